"""`torch.autocast("shadow", dtype=torch.bfloat16)`: PyTorch's lists for CUDA, as kernels on the autocast key."""

from __future__ import annotations

import torch

from auto_research.shadow.tensor import DEVICE_NAME, ShadowTensor

LOWER = (
    "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv",
    "addr", "matmul", "mm", "mv", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "scaled_dot_product_attention", "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell", "lstm.input",
    "gru.input", "rnn_tanh.input", "rnn_relu.input", "lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data",
)  # fmt: skip
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "group_norm", "frobenius_norm.dim", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss",
    "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
)  # fmt: skip
FLOAT32_BY_DTYPE = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "sum",
    "sum.dim_IntList",
)  # fmt: skip
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add", "cat", "stack",
)  # fmt: skip
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def supported_dtypes() -> list[torch.dtype]:
    """Dtypes that `torch.autocast("shadow", dtype=...)` takes."""
    return [torch.bfloat16, torch.float16]


def _eligible(a) -> bool:
    return type(a) is ShadowTensor and a.is_floating_point() and a.dtype is not torch.float64


def _cast(a, dtype):
    if _eligible(a):
        return a.to(dtype)
    if isinstance(a, (list, tuple)):
        return [_cast(x, dtype) for x in a]
    return a


def _tensors(args):
    for a in args:
        if isinstance(a, (list, tuple)):
            yield from _tensors(a)
        elif _eligible(a):
            yield a


def _lower(func):
    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            dtype = torch.get_autocast_dtype(DEVICE_NAME)
            return func(*_cast(args, dtype), **{k: _cast(a, dtype) for k, a in kwargs.items()})

    return kernel


def _float32(func):
    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            return func(*_cast(args, torch.float32), **{k: _cast(a, torch.float32) for k, a in kwargs.items()})

    return kernel


def _by_dtype(func):
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("dtype")

    def kernel(*args, **kwargs):
        given = args[place] if len(args) > place else kwargs.get("dtype")
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            if given is None and _eligible(args[0]):
                args = args[:place]
                kwargs["dtype"] = torch.float32
            return func(*args, **kwargs)

    return kernel


def _widest(func):
    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            kinds = {a.dtype for a in _tensors(args)}
            if len(kinds) > 1:
                args = _cast(args, torch.float32)
            return func(*args, **kwargs)

    return kernel


def _banned(*args, **kwargs):
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. "
        "Use binary_cross_entropy_with_logits."
    )


def register(library: torch.library.Library) -> None:
    """Register the four policies on the AutocastPrivateUse1 key of an `aten` IMPL library."""
    for names, policy in ((LOWER, _lower), (FLOAT32, _float32), (FLOAT32_BY_DTYPE, _by_dtype), (WIDEST, _widest)):
        for name in names:
            packet, _, overload = name.partition(".")
            func = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, policy(func), "AutocastPrivateUse1")
    library.impl("binary_cross_entropy", _banned, "AutocastPrivateUse1")
