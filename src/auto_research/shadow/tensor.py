"""`ShadowTensor`: a tensor that says it lives on `shadow:0` and keeps its values in a CPU tensor."""

from __future__ import annotations

import sys
from collections import OrderedDict

import torch

from auto_research.shadow import failures, memory

DEVICE_NAME = "shadow"
_make = torch.Tensor._make_wrapper_subclass
_set_storage = torch.ops.aten.set_.source_Storage_storage_offset
_get_data = torch.Tensor.data.__get__
_storage = torch.Tensor.untyped_storage
_set_data = torch.Tensor.data.__set__
_device: torch.device | None = None


def shadow_device() -> torch.device:
    """`torch.device("shadow", 0)`; valid once the backend is named (`accelerator.activate`)."""
    global _device
    if _device is None:
        _device = torch.device(DEVICE_NAME, 0)
    return _device


class ShadowTensor(torch.Tensor):
    """Wrapper subclass: sizes, strides, dtype and autograd outside, a CPU tensor `_value` inside.

    Every operator that meets one comes to `dispatch.run`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        try:
            return _run(func, args, kwargs)
        except Exception as error:
            if failures.called_by_engine(sys._getframe().f_back):
                return failures.hold(error)
            raise

    @property
    def data(self):
        return _get_data(self)

    @data.setter
    def data(self, source):
        if type(source) is not ShadowTensor:
            self._leave(source)
            return
        # The C++ setter copies sizes and dtype but knows nothing of `_value`.
        _set_data(self, source)
        self._value = source._value
        self._held = source._held

    def _leave(self, source: torch.Tensor) -> None:
        """Become the plain tensor or parameter `source`, gradient included; whoever holds `self` follows."""
        gradient, self.grad = self.grad, None
        plain = source.detach()
        if getattr(self, "_is_param", False):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        torch.utils.swap_tensors(self, plain)
        if gradient is not None:
            self.grad = gradient.to(source.device)

    def register_hook(self, hook):
        return super().register_hook(failures.guarded(hook))

    def register_post_accumulate_grad_hook(self, hook):
        return super().register_post_accumulate_grad_hook(failures.guarded(hook))

    def untyped_storage(self):
        # Identity of memory for those who look for ties (safetensors, transformers): views of one block agree.
        return self._value.untyped_storage()

    def data_ptr(self):
        return self._value.data_ptr()

    def tolist(self):
        return self._value.tolist()

    def numpy(self, *, force=False):
        if force:
            return self._value.detach().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __repr__(self, *, tensor_contents=None):
        body = repr(self._value)
        extra = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else ""
        if self.is_leaf and self.requires_grad:
            extra = ", requires_grad=True"
        return f"{body[:-1]}, device='{self.device}'{extra})"

    def __format__(self, spec):
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        copied = wrap(self._value.clone())
        copied.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol):
        # Both functions are on the list of `torch.load(weights_only=True)`, and both honour `map_location`.
        if getattr(self, "_is_param", False):
            return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, OrderedDict())
        place = str(self.device)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, (
            self._value.detach().clone(),
            self.dtype,
            place,
            self.requires_grad,
        )

    def __tensor_flatten__(self):
        # Makes `Module.to` swap parameters in place, as it does for CUDA: ties and optimizers survive the move.
        return ["_value"], None

    @staticmethod
    def __tensor_unflatten__(inner_tensors, meta, outer_size, outer_stride):
        return wrap(inner_tensors["_value"])


def wrap(value: torch.Tensor, held: memory.Held | None = None) -> ShadowTensor:
    """A shadow tensor over `value` [any shape, CPU].

    `held` is the byte token of the block that `value` is a view of; None counts a new block.
    """
    if value.layout is not torch.strided:
        raise NotImplementedError(f"the shadow device has no {value.layout} tensors (use a dense gradient or .cpu())")
    outside = _make(
        ShadowTensor,
        value.size(),
        value.stride(),
        value.storage_offset(),
        dtype=value.dtype,
        device=_device or shadow_device(),
    )
    outside._value = value
    outside._held = held if held is not None else memory.Held(value.nbytes)
    return outside


def refresh(outside: ShadowTensor) -> None:
    """Make the outside's sizes and strides follow a `_value` that was resized or transposed in place."""
    value = outside._value
    if value.size() == outside.size() and value.stride() == outside.stride():
        return
    if value.numel() != outside.numel():
        outside._held = memory.Held(value.nbytes)
    before = torch._C._meta_in_tls_dispatch_include()
    with torch.utils._mode_utils.no_dispatch():
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            _set_storage(outside, _storage(outside), value.storage_offset(), list(value.size()), list(value.stride()))
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


def _run(func, args, kwargs):
    """Placeholder until `dispatch` is bound by `bind`."""
    raise RuntimeError("the shadow device is not active")


def bind(run) -> None:
    """Make `run(func, args, kwargs)` the handler of every operator."""
    global _run
    _run = run
