"""G2Rec (arXiv:2606.20554): an interest token behind every item, and the prediction of both.

    v_a = sum_i p_ia x_i / sum_i p_ia;   y_i = sum_a p_ia v_a
    R   = [BOS, x_1, y_1, .., x_N, y_N]
    L_t = - log F(i_{t+1} | R_{<= 2t+1}) + lambda [ - sum_a p_{i_t, a} log F(a | R_{<= 2t}) ]

Item logits are read at y_t (at BOS for the first item), profile logits at x_t, where y_t is not visible yet.

Shapes: B rows, N items of a window, I items, C clusters, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.causal_lm import LanguageModelTrunk
from auto_research.blocks.causal_transformer import CausalTransformer, TransformerConfig
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.softmax_loss import linear_cross_entropy
from auto_research.runtime.precision import float32_region
from auto_research.train.next_item import WindowBatch

START_SCALE = 0.02
INTERESTS = ("token", "none", "repeat", "sum")
BOS, ITEM, INTEREST = range(3)


@dataclass(frozen=True)
class G2RecConfig:
    """length: items of a window.  weight: lambda, 0 builds no profile head.

    interest: "token" (x_t, y_t), "none" (x_t), "repeat" (x_t twice), "sum" (one token x_t + y_t; as it shows y_t, the
        profile of item t is predicted one token earlier).
    prototypes: "recomputed" from the item table in every pass, or "free" parameters.
    backbone: "decoder", trained from scratch, or "causal_lm", the first lm_layers (None: all) layers of a pretrained
        language model with LoRA of rank lora_rank and scale lora_alpha / lora_rank.
    """

    width: int = 96
    heads: int = 4
    layers: int = 2
    dropout: float = 0.1
    length: int = 20
    interest: str = "token"
    prototypes: str = "recomputed"
    weight: float = 1.0
    backbone: str = "decoder"
    lm_layers: int | None = None
    lora_rank: int = 8
    lora_alpha: float = 16.0

    def __post_init__(self) -> None:
        if self.backbone not in ("decoder", "causal_lm"):
            raise ValueError(f"unknown backbone {self.backbone!r}")
        if self.interest not in INTERESTS or self.prototypes not in ("recomputed", "free"):
            raise ValueError(f"unknown interest {self.interest!r} or prototypes {self.prototypes!r}")

    @property
    def stride(self) -> int:
        """Tokens of an item."""
        return 2 if self.interest in ("token", "repeat") else 1


class Tables(NamedTuple):
    """Item vectors x [I + 1, D], prototypes v [C, D] and interest vectors y [I + 1, D].

    A model with neither interest tokens nor profile loss has no v and y.
    """

    items: Tensor
    prototypes: Tensor | None = None
    interests: Tensor | None = None


def prototypes_of(profiles: Tensor, items: Tensor) -> Tensor:
    """v [C, D]: means of items [N, D] weighted by their memberships [N, C], float32; empty clusters are 0."""
    with float32_region(items.device):
        p = profiles.float()
        return (p.t() @ items.float()) / p.sum(0).clamp_min(1e-6).unsqueeze(1)


class G2Rec(nn.Module):
    """items int64[B, L], left-padded with 0 -> states [B, L, D] that predict what follows each item.

    profiles: float[I + 1, C], row 0 zero.  text: float[I + 1, T] frozen vectors, or None.  lm: `load_layers` of the
    backbone "causal_lm".
    """

    def __init__(self, config: G2RecConfig, profiles: Tensor, text: Tensor | None = None, lm: nn.Module | None = None):
        super().__init__()
        self.config, width = config, config.width
        self.item = nn.Embedding(len(profiles), width, padding_idx=0)
        self.position = nn.Parameter(torch.randn(2 * config.length + 1, width) * START_SCALE)
        self.kind = nn.Parameter(torch.randn(3, width) * START_SCALE)
        self.begin = nn.Parameter(torch.randn(width) * START_SCALE)
        nn.init.normal_(self.item.weight, std=START_SCALE)
        with torch.no_grad():
            self.item.weight[0].zero_()
        self.register_buffer("profiles", profiles.float().clone(), persistent=False)
        self.text = None
        if text is not None:
            self.register_buffer("texts", text.float(), persistent=False)
            self.text = nn.Linear(text.shape[1], width, bias=False)
        if config.backbone == "causal_lm":
            self.trunk = LanguageModelTrunk(width, lm, config.lora_rank, config.lora_alpha)
        else:
            sizes = TransformerConfig(width, config.heads, config.layers, dropout=config.dropout)
            self.trunk = CausalTransformer(sizes)
        self.dropout = Dropout(config.dropout)
        self.free = None
        if config.prototypes == "free":
            self.free = nn.Parameter(torch.randn(profiles.shape[1], width) * START_SCALE)
        self.to_profile = nn.Linear(width, width, bias=False) if config.weight else None

    def item_table(self) -> Tensor:
        """x [I + 1, D]; its row 0 is zero, as the padding of every table here."""
        return self.item.weight if self.text is None else self.item.weight + self.text(self.texts)

    def tables(self) -> Tables:
        """All vectors of the current item table."""
        items = self.item_table()
        if self.config.interest in ("none", "repeat") and self.to_profile is None:
            return Tables(items)
        prototypes = self.free if self.free is not None else prototypes_of(self.profiles, items)
        return Tables(items, prototypes, self.profiles @ prototypes)

    def forward(self, items: Tensor) -> Tensor:
        right, padding = to_right(items)
        states = self.read(right, self.tables())
        after = states[:, self.config.stride :: self.config.stride]  # (B, L, D), behind every item
        back = torch.arange(items.shape[1], device=items.device) - padding.unsqueeze(1)
        return after.gather(1, back.clamp(min=0).unsqueeze(2).expand_as(after))

    def read(self, items: Tensor, tables: Tables) -> Tensor:
        """States [B, 1 + N * stride, D] of rows of items [B, N], padded with 0 on the right."""
        config, (batch, length) = self.config, items.shape
        x = tables.items[items] * math.sqrt(config.width)
        slots = 1 + 2 * torch.arange(length, device=items.device)
        if config.interest == "sum":
            x = x + tables.interests[items] * math.sqrt(config.width)
        x = x + self.position[slots] + self.kind[ITEM]
        if config.stride == 2:
            y = x - self.position[slots]
            if config.interest == "token":
                y = tables.interests[items] * math.sqrt(config.width) + self.kind[INTEREST]
            x = torch.stack([x, y + self.position[slots + 1]], dim=2).flatten(1, 2)
        begin = (self.begin + self.position[0] + self.kind[BOS]).expand(batch, 1, -1)
        real = (items > 0).repeat_interleave(config.stride, dim=1)
        mask = torch.cat([real.new_ones(batch, 1), real], dim=1)
        return self.trunk(self.dropout(torch.cat([begin, x], dim=1)), mask)

    def profile_logits(self, states: Tensor, tables: Tables) -> Tensor:
        """Logits float32[B, N, C] of every item's profile, before its interest is visible."""
        if self.config.interest == "sum":  # the token of an item shows its interest, so the one before it has to say
            before = states[:, :-1]
        else:
            before = states[:, 1 :: self.config.stride]
        with float32_region(states.device):
            return self.to_profile(before).float() @ tables.prototypes.float().t()

    def training_loss(self, batch: WindowBatch) -> Tensor:
        """Mean item loss over BOS and all real items plus lambda times the mean profile loss."""
        items, padding = to_right(batch.items)
        target = torch.cat([items[:, :1], to_right(batch.target, padding)[0]], dim=1)  # (B, N + 1)
        tables = self.tables()
        states = self.read(items, tables)
        real = target > 0
        loss = linear_cross_entropy(states[:, :: self.config.stride][real], tables.items, target[real], first=1)
        if self.to_profile is None:
            return loss
        shown = items > 0
        logp = self.profile_logits(states, tables)[shown].log_softmax(-1)
        return loss - self.config.weight * (self.profiles[items[shown]] * logp).sum(-1).mean()

    def profile_kl(self, items: Tensor) -> Tensor:
        """KL(p_i || F) float32 of all real items of left-padded rows, flat."""
        right, _ = to_right(items)
        tables = self.tables()
        shown = right > 0
        logp = self.profile_logits(self.read(right, tables), tables)[shown].log_softmax(-1)
        return F.kl_div(logp, self.profiles[right[shown]], reduction="none").sum(-1)


def to_right(items: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Left-padded rows [B, L] moved to the left, and how many places each moved, int64[B]."""
    if padding is None:
        padding = (items == 0).sum(1)
    source = torch.arange(items.shape[1], device=items.device) + padding.unsqueeze(1)
    moved = items.gather(1, source.clamp(max=items.shape[1] - 1))
    return moved * (source < items.shape[1]), padding
