"""Fingerprints: one hash of everything in the repository that can change what a stage computes.

Code counts by import closure (from the import graph, without importing anything) and by syntax tree without docstrings,
so that a comment, a blank line, a docstring or a touch changes nothing, and an edit of a block changes its users only.
The text of a syntax tree differs between Python minor versions: compare fingerprints within one environment only.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import grimp
from grimp.exceptions import SourceSyntaxError

from auto_research.experiment.card import Card, discover
from auto_research.experiment.loader import use_root
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.files import canonical_json, sha256_bytes, sha256_file, sha256_text

STAGES = "auto_research.experiment.stages"
COMPARE = "auto_research.results.compare"
NEVER_IN_RESULTS = "auto_research.shadow"  # a test device: no number on a real device depends on it
_NOT_CODE = {".py", ".pyc", ".md"}


class Fingerprints:
    """Fingerprints of one code root; every module is read and hashed at most once.

    Parameters
    ----------
    root: folder that holds `adapters/`.
    cards: cards already read, to spare a second look.
    """

    def __init__(self, root: Path, cards: dict[str, Card] | None = None) -> None:
        self.root = use_root(root)
        self._cards = cards
        self._closures: dict[tuple[str, ...], frozenset[str]] = {}
        self._trees: dict[str, str] = {}
        self._codes: dict[Any, str] = {}
        self._stages: dict[tuple[str, str, str, str], str] = {}
        self._files: dict[str, tuple[Path, ...]] = {}

    @cached_property
    def cards(self) -> dict[str, Card]:
        return self._cards if self._cards is not None else discover(self.root)

    @cached_property
    def graph(self) -> grimp.ImportGraph:
        try:
            return grimp.build_graph("auto_research", "adapters", cache_dir=None, exclude_type_checking_imports=True)
        except SourceSyntaxError as error:
            raise ConfigError(f"the import graph cannot be read: {' '.join(str(error).split())}") from error

    @cached_property
    def _folders(self) -> dict[str, Path]:
        import importlib.util

        found = {name: importlib.util.find_spec(name) for name in ("auto_research", "adapters")}
        return {name: Path(spec.origin).parent for name, spec in found.items()}

    def closure(self, *modules: str) -> frozenset[str]:
        """The modules, everything they import directly or not, and all parent packages."""
        if modules not in self._closures:
            unknown = [name for name in modules if name not in self.graph.modules]
            if unknown:
                raise ConfigError(f"no module {unknown[0]} below {self.root}")
            found = set(modules).union(*(self.graph.find_upstream_modules(name) for name in modules))
            found = {name for name in found if not name.startswith(NEVER_IN_RESULTS)}
            found |= {name.rsplit(".", depth)[0] for name in found for depth in range(1, name.count(".") + 1)}
            self._closures[modules] = frozenset(found)
        return self._closures[modules]

    def code(self, *modules: str, files: Iterable[Path] = ()) -> str:
        """sha256 over the closure of `modules` and the bytes of `files` (named relative to the root)."""
        files = tuple(files)
        if (modules, files) not in self._codes:
            parts = {name: self._tree(name) for name in self.closure(*modules)}
            parts |= {os.path.relpath(path, self.root): sha256_file(path) for path in files}
            self._codes[modules, files] = sha256_text(canonical_json(parts))
        return self._codes[modules, files]

    def stage(self, key: str, kind: str, name: str, tier: str) -> str:
        """Fingerprint of an artifact or arm: code, the adapter folder's other files, the card parts it reads."""
        asked = (key, kind, name, tier)
        if asked not in self._stages:
            card = self.cards[key]
            if key not in self._files:
                self._files[key] = _other_files(card.folder)
            code = self.code(STAGES, f"adapters.{card.module}.experiment", files=self._files[key])
            self._stages[asked] = self.combine(code, card.read_by(kind, name, tier))
        return self._stages[asked]

    def compare(self, key: str) -> str:
        """Fingerprint of result.json, report.md and curves.svg: the comparing code and the card parts they show."""
        return self.combine(self.code(COMPARE), self.cards[key].read_by_compare())

    @staticmethod
    def combine(code: str, *parts: Any) -> str:
        """One short fingerprint of a code hash and JSON values (card or configuration parts)."""
        return sha256_text(canonical_json([code, *parts]))[:32]

    def _tree(self, module: str) -> str:
        if module not in self._trees:
            self._trees[module] = tree_hash(self._source(module))
        return self._trees[module]

    def _source(self, module: str) -> Path:
        package, *rest = module.split(".")
        base = self._folders[package].joinpath(*rest)
        return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def tree_hash(path: Path) -> str:
    """sha256 of a Python file's syntax tree without docstrings and positions."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise ConfigError(f"{path} line {error.lineno}: {error.msg}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _has_docstring(
            node
        ):
            node.body = node.body[1:]
    return sha256_bytes(ast.dump(tree).encode())


def _has_docstring(node: ast.AST) -> bool:
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def _other_files(folder: Path) -> tuple[Path, ...]:
    """Data files an adapter keeps beside its code; the card counts by its parts, prose does not count."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / "card.yaml")
    return tuple(
        path
        for path in found
        if path.suffix not in _NOT_CODE and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
