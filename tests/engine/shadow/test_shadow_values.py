"""Operators and modules on the shadow device give the CPU's values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from both_devices import assert_equal_runs
from torch import nn


def _trained(module, *inputs):
    """Output, input gradients and parameter gradients of `module(*inputs)` on the device of the inputs."""
    module = module.to(inputs[0].device)
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    out = module(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out * weight).sum().backward()
    return [out, *(x.grad for x in leaves), *(p.grad for p in module.parameters() if p.grad is not None)]


def _x(device, *shape):
    return torch.randn(*shape).to(device)


MODULES = {
    "linear": lambda d: _trained(nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2)), _x(d, 4, 3)),
    "layer norm": lambda d: _trained(nn.LayerNorm(6), _x(d, 4, 6)),
    "rms norm": lambda d: _trained(nn.RMSNorm(6), _x(d, 4, 6)),
    "batch norm": lambda d: _trained(nn.BatchNorm1d(6), _x(d, 4, 6)),
    "conv": lambda d: _trained(nn.Conv2d(2, 3, 3), _x(d, 2, 2, 6, 6)),
    "prelu": lambda d: _trained(nn.PReLU(), _x(d, 4, 6)),
    "embedding bag": lambda d: _trained(nn.EmbeddingBag(7, 3), torch.tensor([[1, 2], [4, 4]], device=d)),
    "embedding": lambda d: _trained(nn.Embedding(7, 3, padding_idx=0), torch.tensor([[1, 0], [4, 4]], device=d)),
    "encoder layer": lambda d: _trained(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), _x(d, 2, 3, 8)),
    "decoder layer": lambda d: _trained(
        nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), _x(d, 2, 3, 8), _x(d, 2, 4, 8)
    ),
    "dropout": lambda d: _trained(nn.Dropout(0.3), _x(d, 50, 20)),
}


@pytest.mark.parametrize("name", MODULES)
def test_module_values_and_gradients_equal_cpu(name):
    assert_equal_runs(MODULES[name])


def test_encoder_in_inference_equals_cpu():
    def program(device):
        layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).to(device).eval()
        x = _x(device, 2, 3, 8)
        padding = torch.tensor([[False, False, True], [False, False, False]], device=device)
        with torch.inference_mode():
            return [layer(x)[0], layer(x, src_key_padding_mask=padding)[:, :2]]

    assert_equal_runs(program)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("learned_mask", [False, True])
def test_attention_equals_cpu(masked, learned_mask):
    def program(device):
        q, k, v = (_x(device, 2, 2, 4, 8).requires_grad_() for _ in range(3))
        mask = _x(device, 4, 4) if masked else None
        if masked and learned_mask:
            mask.requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked)
        out.square().sum().backward()
        return [out, q.grad, k.grad, v.grad, *([mask.grad] if masked and learned_mask else [])]

    assert_equal_runs(program)


def test_multihead_attention_with_key_padding_equals_cpu():
    def program(device):
        attention = nn.MultiheadAttention(8, 2, batch_first=True).to(device)
        x = _x(device, 2, 3, 8)
        out, weights = attention(x, x, x, key_padding_mask=torch.tensor([[0, 0, 1], [0, 0, 0]], device=device).bool())
        out.sum().backward()
        return [out, weights, attention.in_proj_weight.grad]

    assert_equal_runs(program)


def test_look_ups_and_scatters_equal_cpu():
    def program(device):
        x = _x(device, 5, 4).requires_grad_()
        index = torch.tensor([[0, 2], [1, 1], [3, 0], [2, 2], [0, 1]], device=device)
        yield x.gather(1, index)
        yield torch.zeros(5, 4, device=device).scatter(1, index, 1.0)
        yield torch.zeros(5, 4, device=device).scatter_add(1, index, x[:, :2])
        yield torch.zeros(4, 2, device=device).index_add_(0, torch.tensor([0, 0, 3, 1, 2], device=device), x[:, :2])
        yield torch.zeros(3, device=device).scatter_reduce(0, index[:, 0] % 3, x[:, 0], "amax", include_self=False)
        yield x[x > 0]
        yield x[torch.tensor([4, 0], device=device), :2]
        yield x[[4, 0]]
        yield torch.where(x > 0, x, torch.tensor(-1.0))
        yield x.masked_fill(x < 0, -1e9).softmax(-1)
        yield x.index_select(1, torch.tensor([3, 3], device=device))
        yield torch.take_along_dim(x, index, 1)
        y = x.detach().clone()
        y[y > 1] = 7.0
        y[0, :2] += 1
        y[1] = torch.tensor(2.0)
        yield y
        x.gather(1, index).prod(1).sum().backward()
        yield x.grad

    assert_equal_runs(program)


def test_orders_equal_cpu():
    def program(device):
        x = _x(device, 6, 7)
        yield from torch.sort(x, dim=1, descending=True)
        yield from x.topk(3)
        yield x.argsort(dim=0, stable=True)
        yield from torch.unique(x.round(), return_counts=True)
        yield from x.max(1)
        yield x.argmax(1)
        yield from x.kthvalue(2)
        yield x.cumsum(0)
        yield torch.bucketize(x, torch.linspace(-1, 1, 5, device=device))
        yield torch.searchsorted(torch.linspace(-1, 1, 5, device=device), x)
        yield F.one_hot(x.argmax(1), 7)
        yield x.nonzero()
        yield torch.isin(x.round(), torch.tensor([0.0, 1.0], device=device))
        yield x.repeat_interleave(torch.tensor([1, 2, 0, 1, 1, 1], device=device), 0)

    assert_equal_runs(program)


def test_products_equal_cpu():
    def program(device):
        a, b = _x(device, 3, 4, 5).requires_grad_(), _x(device, 3, 5, 2).requires_grad_()
        yield a @ b
        yield torch.einsum("bij,bjk->ik", a, b)
        yield torch.bmm(a, b)
        yield torch.baddbmm(_x(device, 3, 4, 2), a, b)
        yield F.bilinear(a[:, 0], b[:, :, 0], _x(device, 2, 5, 5))
        yield torch.cdist(a[0], a[1])
        yield torch.outer(a[0, 0], b[0, :, 0])
        yield F.cosine_similarity(a[0], a[1])
        (a @ b).square().mean().backward()
        yield a.grad
        yield b.grad

    assert_equal_runs(program)


def test_losses_equal_cpu():
    def program(device):
        x, y = _x(device, 6, 4).requires_grad_(), torch.tensor([0, 1, 2, 3, 0, -100], device=device)
        p = torch.rand(6, 4).to(device)
        losses = [
            F.cross_entropy(x, y),
            F.cross_entropy(x, y, weight=torch.arange(1.0, 5.0, device=device), label_smoothing=0.1),
            F.cross_entropy(x, p.softmax(-1)),
            F.binary_cross_entropy_with_logits(x, p),
            F.binary_cross_entropy(x.sigmoid(), p),
            F.mse_loss(x, p),
            F.smooth_l1_loss(x, p),
            F.kl_div(x.log_softmax(-1), p.softmax(-1), reduction="batchmean"),
            F.logsigmoid(x).mean(),
            F.margin_ranking_loss(x[:, 0], x[:, 1], torch.ones(6, device=device)),
        ]
        sum(losses).backward()
        return [*losses, x.grad]

    assert_equal_runs(program)


def test_factories_equal_cpu():
    def program(device):
        yield torch.zeros(2, 3, device=device)
        yield torch.ones(2, device=device, dtype=torch.int32)
        yield torch.full((2,), 3.5, device=device)
        yield torch.arange(7, device=device)
        yield torch.arange(1, 7, 2, device=device)
        yield torch.linspace(0, 1, 5, device=device)
        yield torch.eye(3, device=device)
        yield torch.tril(torch.ones(3, 3, device=device))
        yield torch.triu_indices(3, 3, device=device)
        yield torch.tensor([[1.0, 2.0]], device=device)
        yield torch.as_tensor([1, 2], device=device)
        yield torch.scalar_tensor(2.0, device=device)
        yield torch.empty_strided((2, 3), (1, 2), device=device).fill_(4.0)
        yield torch.empty(0, device=device)
        yield torch.zeros(2, device=device).new_full((2, 2), 3.0)
        yield torch.zeros_like(torch.ones(3, device=device))
        yield torch.hann_window(5, device=device)
        yield torch.complex(torch.ones(2, device=device), torch.ones(2, device=device)).conj().imag
        yield torch.fft.rfft(torch.arange(8.0, device=device)).abs()

    assert_equal_runs(program)


def test_python_values_leave_the_device():
    def program(device):
        x = torch.arange(6.0, device=device).view(2, 3)
        return [
            x.tolist(),
            x.sum().item(),
            float(x[0, 1]),
            int(x[1, 0]),
            bool((x > 4).any()),
            len(x),
            x.shape,
            x.numel(),
        ]

    assert_equal_runs(program)


def test_in_place_shape_changes_and_out_arguments_equal_cpu():
    def program(device):
        x = _x(device, 3, 4)
        x.t_()
        x.unsqueeze_(0)
        assert x.shape == (1, 4, 3)
        out = torch.empty(0, device=device)
        torch.add(x, x, out=out)
        view = x.transpose(1, 2)[0]
        view[0, 0] = 9.0
        x.transpose_(1, 2).squeeze_(0)
        assert x.is_contiguous()
        assert x[0, 0].item() == 9.0
        buffer = torch.empty(2, device=device)
        buffer.resize_(3).fill_(1.0)
        return [x, out, view, buffer]

    assert_equal_runs(program)


def test_views_share_values_both_ways():
    base = torch.zeros(2, 3, device="shadow")
    row = base[1]
    row += 1
    base.mul_(2)
    assert row.tolist() == [2.0, 2.0, 2.0]
    parts = base.split(1, dim=1)
    parts[2].fill_(5)
    assert base[:, 2].tolist() == [5.0, 5.0]


def test_in_place_on_a_view_keeps_gradients():
    def program(device):
        x = _x(device, 3, 4).requires_grad_()
        y = x * 2
        y[:, 1:3].mul_(3.0)
        y.sum().backward()
        return [y, x.grad]

    assert_equal_runs(program)


def test_second_derivatives_equal_cpu():
    def program(device):
        x = _x(device, 4).requires_grad_()
        (first,) = torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return [first, second]

    assert_equal_runs(program)


def test_checkpointed_segment_with_dropout_equals_cpu():
    from torch.utils.checkpoint import checkpoint

    def program(device):
        block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()).to(device)
        x = _x(device, 8, 6).requires_grad_()
        out = checkpoint(block, x, use_reentrant=False)
        out.sum().backward()
        return [out, x.grad, block[0].weight.grad]

    assert_equal_runs(program)


def test_device_is_reported_everywhere():
    x = torch.zeros(2, device="shadow", requires_grad=True)
    y = (x * 2).sum()
    y.backward()
    assert {str(t.device) for t in (x, y, x.grad, x.detach(), x.to("shadow:0"))} == {"shadow:0"}
    assert x.is_shadow
    assert not x.cpu().is_shadow
    assert x.cpu().device.type == "cpu"
    assert type(x.cpu()) is torch.Tensor
    assert "device='shadow:0'" in repr(x)
    assert torch.get_device_module("shadow").device_count() == 1


def test_a_second_card_does_not_exist():
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2, device="shadow:1")
