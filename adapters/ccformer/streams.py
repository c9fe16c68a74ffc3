"""Layers over field streams S [F, R, N, d]: one row of weights per field, padded positions are always exactly 0.

CCFormer (arXiv:2607.28070): cross-field interaction inside an event, hierarchical compression, sequence interaction.
Everything that reads a stream sees it RMS-normalised, because compressed states grow with depth; the norms have no gain,
which the field's next weight absorbs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.per_token_ffn import private_linear
from auto_research.blocks.private_projection import PrivateSwiGLU
from auto_research.blocks.request_attention import visible_softmax
from auto_research.runtime.precision import float32_region

EPS = 1e-6
TAPS = 3  # of the causal convolution
WINDOW = 2  # positions merged by one compression


def unit_rms(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32; 0 stays 0."""
    with float32_region(x.device):
        return F.rms_norm(x.float(), x.shape[-1:], eps=EPS).to(x.dtype)


class FieldLinear(nn.Module):
    """One Linear per field, [F, B, D] -> [F, B, K]; shared: the same for all fields (ablation)."""

    def __init__(self, fields: int, inputs: int, outputs: int, *, bias: bool = True, shared: bool = False):
        super().__init__()
        self.weight, offset = private_linear(1 if shared else fields, inputs, outputs)
        self.bias = offset if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.expand(len(x), -1, -1)
        return torch.bmm(x, weight) if self.bias is None else torch.baddbmm(self.bias.expand(len(x), -1, -1), x, weight)


class CrossField(nn.Module):
    """The fields of one event attend to each other, each with projections of its own; a gate per field writes back.

        O_f = sum_g softmax_g(Q_f K_g^T / sqrt(d_h)) V_g;   S_f <- S_f + sigmoid(w_f^g [N_f; O_f]) (O_f W_f^O)

    N_f = RMSNorm(S_f) is what all projections and the gate read. O(F^2 d) per event.
    """

    def __init__(self, fields: int, width: int, heads: int, shared: bool = False):
        super().__init__()
        if width % heads:
            raise ValueError(f"ccformer: width {width} is not divisible by {heads} heads")
        self.scale = (width // heads) ** -0.5
        self.q, self.k, self.v = (FieldLinear(fields, width, width, shared=shared) for _ in range(3))
        self.out = FieldLinear(fields, width, width, shared=shared)
        self.gate_state, self.gate = FieldLinear(fields, width, 1, bias=False), FieldLinear(fields, width, 1)
        heads_of = torch.eye(heads).repeat_interleave(width // heads, dim=0)  # (d, H): sums the channels of a head
        self.register_buffer("heads_of", heads_of, persistent=False)

    def forward(self, s: Tensor, mask: Tensor) -> Tensor:
        n = unit_rms(s).flatten(1, 2)  # (F, B, d), B = R N
        q, keys, values = self.q(n), self.k(n).unbind(), self.v(n).unbind()  # (F, B, d); F times (B, d)
        with float32_region(s.device):
            scores = torch.stack([(q.float() * k.float()) @ self.heads_of for k in keys])  # (G, F, B, H)
            weights = (self.scale * scores).softmax(0) @ self.heads_of.t()  # (G, F, B, d)
        shares = [weight * v for weight, v in zip(weights.to(q.dtype).unbind(), values, strict=True)]
        read = sum(shares[1:], start=shares[0])  # (F, B, d)
        gate = torch.sigmoid(self.gate_state(n) + self.gate(read))  # (F, B, 1)
        gate = gate * mask.flatten().unsqueeze(1).to(gate.dtype)
        return s + (gate * self.out(read)).view(s.shape)

    def flops(self, positions: int) -> int:
        """Forward matrix FLOPs; the element-wise F x F products of an event are not counted."""
        fields, (width, heads) = len(self.gate.weight), self.heads_of.shape
        sums = 2 * fields * heads * width  # channels of a head, and their weights back
        return 2 * positions * fields * (4 * width * width + 2 * width + sums)


class Compress(nn.Module):
    """Merge the positions before the newest `recent`, two by two: m = sum_j a_j s_j + mean_j s_j.

    a = softmax_j(w_f . RMSNorm(s_j)) over the real members of the window. Windows are aligned at the border with the
    recent part, so that only the oldest can be incomplete; an all-padding window stays padding.
    S [F, R, N, d], mask bool[R, N] -> [F, R, ceil((N - recent) / 2) + recent, d] and its mask.
    """

    def __init__(self, fields: int, width: int, recent: int):
        super().__init__()
        self.recent = recent
        self.score = nn.Parameter(torch.randn(fields, width, 1) * width**-0.5)

    def forward(self, s: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        cut = s.shape[2] - self.recent
        if cut <= 0:
            return s, mask
        old, old_mask = s[:, :, :cut], mask[:, :cut]
        missing = -cut % WINDOW
        old = F.pad(old, (0, 0, missing, 0)).unflatten(2, (-1, WINDOW))  # (F, R, W, 2, d)
        valid = F.pad(old_mask, (missing, 0)).unflatten(1, (-1, WINDOW))  # (R, W, 2)
        with float32_region(s.device):
            scores = torch.bmm(unit_rms(old).float().flatten(1, 3), self.score.float())  # (F, R W 2, 1)
            scores = scores.view(old.shape[:4])
            weights = visible_softmax(scores.masked_fill(~valid, -torch.inf))
            weights = weights + valid / valid.sum(2, keepdim=True).clamp(min=1)
        parts = [
            share.unsqueeze(3) * x for share, x in zip(weights.to(old.dtype).unbind(3), old.unbind(3), strict=True)
        ]
        merged = parts[0] + parts[1]  # (F, R, W, d)
        return torch.cat([merged, s[:, :, cut:]], dim=2), torch.cat([valid.any(2), mask[:, cut:]], dim=1)

    def flops(self, requests: int, length: int) -> int:
        """Forward matrix FLOPs of the pooling scores."""
        merged = max(0, compressed_length(length, self.recent) - self.recent)
        return 2 * requests * WINDOW * merged * self.score.numel()


def compressed_length(length: int, recent: int) -> int:
    """Positions after one compression."""
    old = length - recent
    return length if old <= 0 else -(-old // WINDOW) + recent


class ConvMix(nn.Module):
    """Mix(N): causal depthwise convolution (kernel 3, per field and channel), then a SwiGLU per field.

    Three shifted products instead of conv1d: no layout change, and the same kernel on every device.
    """

    def __init__(self, fields: int, width: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        taps = torch.randn(TAPS, fields, 1, 1, width) * (TAPS * width) ** -0.5
        taps[0] += 1  # starts near the identity
        self.taps = nn.Parameter(taps)
        self.ffn = PrivateSwiGLU(fields, width, hidden, dropout)

    def forward(self, n: Tensor, mask: Tensor) -> Tensor:
        length = n.shape[2]
        y = n * self.taps[0]
        for shift in range(1, min(TAPS, length)):
            y = y + F.pad(n[:, :, : length - shift], (0, 0, shift, 0)) * self.taps[shift]
        return self.ffn(y.flatten(1, 2)).view(n.shape)

    def flops(self, positions: int) -> int:
        return self.ffn.flops(positions)


class AttentionMix(nn.Module):
    """Ablation: 4-head causal self-attention along each stream in place of the convolution, then the same SwiGLU."""

    def __init__(self, fields: int, width: int, hidden: int, dropout: float = 0.0, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = FieldLinear(fields, width, 3 * width), FieldLinear(fields, width, width)
        self.ffn = PrivateSwiGLU(fields, width, hidden, dropout)

    def forward(self, n: Tensor, mask: Tensor) -> Tensor:
        fields, requests, length, _ = n.shape
        qkv = self.qkv(n.flatten(1, 2)).view(fields * requests, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (F R, H, N, dh) each
        itself = torch.eye(length, dtype=torch.bool, device=n.device)
        visible = (torch.ones_like(itself).tril() & mask.unsqueeze(1)) | itself  # (R, N, N)
        visible = visible.repeat(fields, 1, 1).unsqueeze(1)
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        read = read.transpose(1, 2).reshape(fields, requests * length, -1)
        return self.ffn(self.out(read)).view(n.shape)

    def flops(self, positions: int) -> int:
        """Without the products of the scores."""
        fields, width, _ = self.out.weight.shape
        return 8 * positions * fields * width * width + self.ffn.flops(positions)


class StreamLayer(nn.Module):
    """One level of the sequence branch: cross-field, Compress, C + Mix(RMSNorm(C)). S, mask -> shorter S, mask."""

    def __init__(
        self,
        fields: int,
        width: int,
        *,
        heads: int,
        recent: int | None,
        hidden: int,
        mix: str = "conv",
        cross: bool = True,
        shared: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.cross = CrossField(fields, width, heads, shared) if cross else None
        self.compress = None if recent is None else Compress(fields, width, recent)
        self.mix = {"conv": ConvMix, "attention": AttentionMix}[mix](fields, width, hidden, dropout)

    def forward(self, s: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.cross is not None:
            s = self.cross(s, mask)
        if self.compress is not None:
            s, mask = self.compress(s, mask)
        return (s + self.mix(unit_rms(s), mask)) * mask.unsqueeze(2).to(s.dtype), mask

    def length(self, length: int) -> int:
        return length if self.compress is None else compressed_length(length, self.compress.recent)

    def flops(self, requests: int, length: int) -> int:
        """Forward matrix FLOPs on `length` positions that come in."""
        cross = 0 if self.cross is None else self.cross.flops(requests * length)
        pooling = 0 if self.compress is None else self.compress.flops(requests, length)
        return cross + pooling + self.mix.flops(requests * self.length(length))
