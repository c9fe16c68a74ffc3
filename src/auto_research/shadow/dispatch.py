"""What happens to one operator on the shadow device: check devices, run on CPU, wrap again."""

from __future__ import annotations

import torch

from auto_research.shadow import generators, lapack
from auto_research.shadow.tensor import DEVICE_NAME, ShadowTensor, refresh, wrap

_Tensor = torch.Tensor
_CPU = torch.device("cpu")
_DTYPE_STRICT = {
    "mm", "bmm", "addmm", "addmm_", "addbmm", "baddbmm", "baddbmm_", "mv", "addmv", "dot", "vdot", "addr",
    "convolution", "_convolution", "linear", "matmul", "native_layer_norm", "native_group_norm", "_trilinear",
}  # fmt: skip
# CUDA lets a 0-dim CPU tensor into elementwise arithmetic; look-ups and concatenations have no such exception.
_NO_SCALARS = {
    "embedding", "_embedding_bag", "_embedding_bag_forward_only", "index_select", "gather", "scatter", "scatter_",
    "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index", "take",
    "index_add", "index_add_", "index_copy", "index_copy_", "cat",
    "stack", "_unsafe_index", "nll_loss_forward", "bucketize", "searchsorted", "multinomial",
    "one_hot", "repeat_interleave", "take_along_dim",
}  # fmt: skip
_RESIZERS = {"set_", "resize_", "resize_as_", "_resize_output_"}
_SHARES_MEMORY = {"_unsafe_view", "_reshape_alias", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes"}


class MixedDevices(RuntimeError):
    """One operator was given tensors (or a generator) of more than one device."""


class Plan:
    """What the schema of one operator says, read once.

    `writes`: (position or None, name) of arguments written to; `returns`: per return "new", "view" or the index into
    `writes`; `shape`: "new", "view" or "in place" for the three common forms, else ""; `view_of`: position of the argument
    a view looks at; `resizes`: a written argument may change its sizes; `special`: a handler that replaces all this.
    """

    __slots__ = (
        "generators", "name", "no_scalars", "resizes", "returns", "shape", "special", "strict", "view_of", "writes",
    )  # fmt: skip

    def __init__(self, func) -> None:
        schema = func._schema
        self.name = schema.name.partition("::")[2]
        self.special = _lapack if self.name in lapack.OPERATORS else SPECIAL.get(self.name)
        self.no_scalars = self.name in _NO_SCALARS
        self.strict = self.name in _DTYPE_STRICT
        self.writes, self.view_of, self.generators, sets = [], 0, [], []
        for position, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            if argument.name == "generator" and not argument.kwarg_only:
                self.generators.append(position)
            if alias is not None and alias.is_write:
                self.writes.append((None if argument.kwarg_only else position, argument.name))
                sets.append(alias.before_set)
            elif alias is not None:
                self.view_of = position
        unsaid = "view" if self.name in _SHARES_MEMORY else "new"
        self.returns = [
            unsaid
            if one.alias_info is None
            else sets.index(one.alias_info.before_set)
            if one.alias_info.is_write
            else "view"
            for one in schema.returns
        ]
        out = any(position is None for position, _ in self.writes)
        self.resizes = out or torch.Tag.inplace_view in func.tags or self.name in _RESIZERS
        self.shape = ""
        if len(self.returns) == 1 and not self.writes:
            self.shape = self.returns[0]
        elif self.returns == [0] and self.writes[0][0] == 0 and not self.resizes:
            self.shape = "in place"


_plans: dict = {}
SPECIAL: dict = {}


def run(func, args, kwargs):
    """Run operator `func` whose arguments hold at least one shadow tensor.

    Raises MixedDevices for a CPU tensor of one or more dimensions beside a shadow tensor, for a CPU tensor written
    to, and for a generator of another device.
    """
    plan = _plans.get(func)
    if plan is None:
        plan = _plans[func] = Plan(func)
    if plan.special is not None:
        return plan.special(func, args, kwargs or {})
    return run_plain(plan, func, args, kwargs)


def run_plain(plan: Plan, func, args, kwargs):
    """`run` without the special handlers."""
    inside = [
        a._value if type(a) is ShadowTensor else (a if not isinstance(a, (_Tensor, list, tuple)) else _inside(plan, a))
        for a in args
    ]
    to_shadow, kwargs_inside = True, {}
    for key, a in (kwargs or {}).items():
        if key == "device":
            if a is not None:
                to_shadow = a.type == DEVICE_NAME
                a = _CPU if to_shadow else a
        elif key == "generator":
            a = generators.value_of(a, plan.name) if a is not None else None
        else:
            a = _inside(plan, a)
        kwargs_inside[key] = a
    for position in plan.generators:
        if position < len(inside) and inside[position] is not None:
            inside[position] = generators.value_of(inside[position], plan.name)
    if plan.strict:
        _check_dtypes(plan, inside)
    out = func(*inside, **kwargs_inside)
    if plan.shape == "in place" and type(args[0]) is ShadowTensor:
        return args[0]
    if plan.shape == "new":
        if not to_shadow:
            return out
        return wrap(out) if type(out) is _Tensor else _outside(out, None)
    if plan.shape == "view" and type(out) is _Tensor and type(args[plan.view_of]) is ShadowTensor:
        return wrap(out, args[plan.view_of]._held)
    return _answer(plan, args, kwargs, out)


def _inside(plan: Plan, a):
    """The CPU value of an argument; raises MixedDevices for a CPU tensor that may not be here."""
    kind = type(a)
    if kind is ShadowTensor:
        return a._value
    if kind is list or kind is tuple:
        return [_inside(plan, x) for x in a]
    if isinstance(a, _Tensor):
        if a.dim() == 0 and a.device.type == "cpu" and not plan.no_scalars:
            return a
        raise MixedDevices(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{DEVICE_NAME}:0 and {a.device}! (operator {plan.name}, a {tuple(a.shape)} {a.dtype} tensor on {a.device})"
        )
    return a


def _outside(out, held):
    if isinstance(out, _Tensor):
        return wrap(out, held)
    if isinstance(out, (list, tuple)):
        return type(out)(_outside(x, held) for x in out)
    return out


def _answer(plan: Plan, args, kwargs, out):
    """Give back the written arguments themselves, views that share their base's bytes, and new tensors."""
    written = []
    for position, name in plan.writes:
        target = args[position] if position is not None and position < len(args) else (kwargs or {}).get(name)
        for one in target if isinstance(target, (list, tuple)) else (target,):
            if type(one) is ShadowTensor:
                if plan.resizes:
                    refresh(one)
            elif isinstance(one, _Tensor):
                raise MixedDevices(f"operator {plan.name} would write shadow values into a tensor on {one.device}")
        written.append(target)
    if not plan.returns:
        return None
    held = None
    if "view" in plan.returns:
        base = args[plan.view_of] if args else None
        held = base._held if type(base) is ShadowTensor else None
    outs = out if len(plan.returns) > 1 else (out,)
    answers = [
        written[how] if isinstance(how, int) else _outside(one, held if how == "view" else None)
        for how, one in zip(plan.returns, outs, strict=True)
    ]
    return tuple(answers) if len(answers) > 1 else answers[0]


def _check_dtypes(plan: Plan, inside) -> None:
    """Refuse products of two floating dtypes, which CUDA refuses and some CPU kernels let through."""
    seen = None
    for a in inside:
        if isinstance(a, _Tensor) and (a.is_floating_point() or a.is_complex()):
            if seen is None:
                seen = a.dtype
            elif a.dtype != seen:
                raise RuntimeError(f"operator {plan.name}: expected tensors of one dtype, but got {seen} and {a.dtype}")


def _lapack(func, args, kwargs):
    lapack.check(func._schema.name)
    return run_plain(_plans[func], func, args, kwargs)


def special(*names: str):
    """Register a handler `(func, args, kwargs)` for all overloads of the named operators."""

    def register(handler):
        for name in names:
            SPECIAL[name] = handler
        return handler

    return register


def value_of(a):
    """The CPU tensor inside `a`, or `a` itself when it is no shadow tensor."""
    return a._value if type(a) is ShadowTensor else a


@special("copy_")
def _copy(func, args, kwargs):
    """`copy_` is the one operator that may cross devices, in both directions."""
    value_of(args[0]).copy_(value_of(args[1]))
    return args[0]


@special("_conj", "_neg_view")
def _resolved(func, args, kwargs):
    """Lazy conjugates and negatives are made at once: the outside carries no such bit."""
    value = args[0]._value
    return wrap(torch.conj_physical(value) if "conj" in func._schema.name else torch.neg(value))


@special("is_pinned", "_nested_tensor_from_mask_left_aligned")
def _no(func, args, kwargs):
    """No pinned memory, and no nested tensors: TransformerEncoder keeps its padded batch."""
    return False


@special("record_stream")
def _no_stream(func, args, kwargs):
    return None


@special("_pack_padded_sequence")
def _pack(func, args, kwargs):
    """Lengths are CPU tensors here, as CUDA demands; the batch sizes come back on CPU."""
    data, lengths, *rest = args
    if type(lengths) is ShadowTensor:
        raise RuntimeError("'lengths' argument should be a 1D CPU int64 tensor, but got a tensor on shadow:0")
    packed, batch_sizes = func(data._value, lengths, *rest, **kwargs)
    return wrap(packed), batch_sizes


@special("_pack_padded_sequence_backward", "_pad_packed_sequence")
def _packed_sizes(func, args, kwargs):
    """Batch sizes stay on CPU beside shadow data."""
    return _outside(func(*[value_of(a) for a in args], **{k: value_of(a) for k, a in kwargs.items()}), None)


@special("_has_compatible_shallow_copy_type")
def _compatible(func, args, kwargs):
    return type(args[0]) is type(args[1])
