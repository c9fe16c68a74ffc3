"""Which adapters have an accelerator path, read from the syntax trees of the adapter's own folder.

A path is a call of `auto_research.runtime.devices.device_for` (under any import alias) or a use of `torch.cuda`.
Comments and strings are no path, and neither is what another folder does: names are resolved through the imports
of the adapter's own files only.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

DEVICE_FOR = "auto_research.runtime.devices.device_for"
TORCH_CUDA = "torch.cuda"


@dataclass(frozen=True, order=True)
class Site:
    """One place in an adapter's folder that reaches for a device. `kind` is `device_for` or `torch.cuda`."""

    file: str
    line: int
    kind: str


def scan_folder(folder: Path) -> list[Site]:
    """All device sites of one adapter folder, sorted; `file` is relative to the folder.

    Raises SyntaxError with the file name when a source cannot be parsed.
    """
    package = f"adapters.{folder.name}"
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        is_package = path.name == "__init__.py"
        modules[".".join(parts)] = (path.relative_to(folder).as_posix(), tree, is_package)
    exports = {name: _bindings(tree.body, name, is_package) for name, (_, tree, is_package) in modules.items()}
    sites: set[Site] = set()
    for name, (file, tree, is_package) in modules.items():
        visitor = _Sites(file, name, is_package, exports)
        visitor.visit_scope(tree.body)
        sites |= visitor.sites
    return sorted(sites)


def has_device_path(folder: Path) -> bool:
    """True when the folder's own sources call `device_for` or use `torch.cuda`."""
    return bool(scan_folder(folder))


def _bindings(body: list[ast.stmt], module: str, is_package: bool) -> dict[str, str | None]:
    """Names bound in one scope: dotted origin for imports and plain aliases, None for anything else."""
    names: dict[str, str | None] = {}
    aliases: list[tuple[str, ast.expr]] = []
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, module, is_package)
            for alias in node.names:
                names[alias.asname or alias.name] = f"{origin}.{alias.name}"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.setdefault(node.name, None)
            continue
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            aliases.append((node.targets[0].id, node.value))
            names.setdefault(node.targets[0].id, None)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, None)
        elif isinstance(node, ast.Lambda):
            continue
        stack.extend(ast.iter_child_nodes(node))
    for name, value in aliases:
        dotted = _dotted(value)
        if dotted is not None and names.get(name) is None:
            head, *rest = dotted
            origin = names.get(head)
            names[name] = ".".join([origin, *rest]) if origin else None
    return names


def _origin(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    drop = node.level - (1 if is_package else 0)
    base = parts[: len(parts) - drop] if drop else parts
    return ".".join([*base, node.module] if node.module else base)


def _dotted(node: ast.expr) -> list[str] | None:
    """`a.b.c` as ["a", "b", "c"], None for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


class _Sites(ast.NodeVisitor):
    def __init__(self, file: str, module: str, is_package: bool, exports: dict[str, dict[str, str | None]]) -> None:
        self.file, self.module, self.is_package, self.exports = file, module, is_package, exports
        self.scopes: list[dict[str, str | None]] = []
        self.sites: set[Site] = set()

    def visit_scope(self, body: list[ast.stmt], names: dict[str, str | None] | None = None) -> None:
        self.scopes.append({**(names or {}), **_bindings(body, self.module, self.is_package)})
        for node in body:
            self.visit(node)
        self.scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for outside in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            if outside is not None:
                self.visit(outside)
        self.visit_scope(node.body, _arguments(node.args))

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.scopes.append(_arguments(node.args))
        self.visit(node.body)
        self.scopes.pop()

    def visit_Call(self, node: ast.Call) -> None:
        if self._resolve(node.func) == DEVICE_FOR:
            self.sites.add(Site(self.file, node.lineno, "device_for"))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._torch_cuda(node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._torch_cuda(node)

    def _torch_cuda(self, node: ast.Attribute | ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            return
        origin = self._resolve(node)
        if origin is not None and (origin == TORCH_CUDA or origin.startswith(TORCH_CUDA + ".")):
            self.sites.add(Site(self.file, node.lineno, "torch.cuda"))

    def _resolve(self, node: ast.expr) -> str | None:
        dotted = _dotted(node)
        if dotted is None:
            return None
        head, *rest = dotted
        origin = next((scope[head] for scope in reversed(self.scopes) if head in scope), None)
        return None if origin is None else self._follow(".".join([origin, *rest]))

    def _follow(self, origin: str) -> str:
        """A name imported from a file of the same folder stands for what that file imported under it."""
        for _ in range(len(self.exports) + 1):
            module, _, name = origin.rpartition(".")
            target = self.exports.get(module, {}).get(name)
            if target is None or target == origin:
                return origin
            origin = target
        return origin


def _arguments(arguments: ast.arguments) -> dict[str, str | None]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
    return {argument.arg: None for argument in every}
