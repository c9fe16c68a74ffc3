"""ARGUS (arXiv:2507.15994): autoregressive pre-training over (context, item, feedback), and a two-tower ranker.

    x_t = C(c_t) + I(i_t) + F(f_t) + pos_t          one token per event (merged), or three (triplet)
    h_t = Transformer(x_1 .. x_t)                   events are predicted from h_p(t), the strictly earlier second
    p(i_t, f_t | past, c_t) = p(i_t | past, c_t) p(f_t | past, c_t, i_t)
    L   = L_NIP + L_FP,     L_ft = softplus(-(s_a - s_b)) + 0.1 L_NIP

Shapes: B windows, L events, N events with a loss, I items, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.argus.events import EventBatch
from auto_research.blocks.biased_transformer import BiasedConfig, BiasedTransformer
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.pairwise_loss import logistic_pairs
from auto_research.blocks.sampled_softmax import Temperature, sampled_softmax
from auto_research.blocks.softmax_loss import linear_cross_entropy
from auto_research.runtime.precision import float32_region

START_SCALE = 0.05
START_TEMPERATURE = 0.05
CONTEXTS = {"hour": 24, "weekday": 7, "gap": 32}
RATINGS, LIKE, LOVE = 5, 4, 5
INPUTS = ("merged", "triplet", "items")
KEEP_RETRIEVAL = 0.1
AT_ONCE = 64


@dataclass(frozen=True)
class ArgusConfig:
    """Sizes and switches.

    context: longest window.  inputs: merged | triplet | items (x_t = I_t + pos_t, and a query without context).
    encoder: transformer | mean of x_1..x_t.  nip, fp: which losses.  reverse: feedback first, the item given feedback.
    softmax: sampled | full.  logq: False leaves the correction out.  tower: a user and an item tower.
    """

    width: int = 64
    layers: int = 2
    heads: int = 4
    field: int = 16
    dropout: float = 0.3
    context: int = 128
    inputs: str = "merged"
    encoder: str = "transformer"
    nip: bool = True
    fp: bool = True
    reverse: bool = False
    softmax: str = "sampled"
    logq: bool = True
    tower: bool = False

    def __post_init__(self) -> None:
        known = (
            self.inputs in INPUTS and self.encoder in ("transformer", "mean") and self.softmax in ("sampled", "full")
        )
        if not known or not (self.nip or self.fp):
            raise ValueError(f"unknown inputs, encoder or softmax, or no loss, in {self}")
        if self.inputs != "merged" and (self.reverse or self.encoder == "mean"):
            raise ValueError("the reversed factorisation and the mean encoder need merged inputs")


def two_layers(inputs: int, width: int, outputs: int | None = None) -> nn.Sequential:
    """Linear-SiLU-Linear."""
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, outputs or width))


class ContextTower(nn.Module):
    """C(c_t) of hour, weekday and log2 gap: [B, L, D]."""

    def __init__(self, field: int, width: int):
        super().__init__()
        self.fields = nn.ModuleDict({name: nn.Embedding(rows, field) for name, rows in CONTEXTS.items()})
        self.mlp = two_layers(len(CONTEXTS) * field, width)

    def forward(self, batch: EventBatch) -> Tensor:
        return self.mlp(torch.cat([table(getattr(batch, name)) for name, table in self.fields.items()], dim=-1))


class ItemTower(nn.Module):
    """I(i) of id, genres and decade for the whole catalogue: [I, D]; row 0 is padding.

    Tables start at unit scale: at 0.05 the layer's bias makes all unit item vectors nearly one (mean cosine 0.95).
    """

    def __init__(self, field: int, width: int, genres: Tensor, decade: Tensor, decades: int):
        super().__init__()
        self.register_buffer("genres", genres.float(), persistent=False)
        self.register_buffer("decade_of", decade.long(), persistent=False)
        self.item, self.decade = nn.Embedding(len(genres), field), nn.Embedding(decades, field)
        self.genre = nn.Linear(genres.shape[1], field, bias=False)
        self.mlp = two_layers(3 * field, width)

    def forward(self) -> Tensor:
        parts = [self.item.weight, self.genre(self.genres), self.decade(self.decade_of)]
        return self.mlp(torch.cat(parts, dim=1))


class FeedbackTower(nn.Module):
    """F(f) of rating, like and love, for the ratings 0 (unknown), 1..5: [6, D]."""

    def __init__(self, field: int, width: int):
        super().__init__()
        rating = torch.arange(RATINGS + 1)
        self.register_buffer("columns", torch.stack([rating, (rating >= LIKE).long(), (rating >= LOVE).long()], 1))
        self.fields = nn.ModuleList(nn.Embedding(rows, field) for rows in (RATINGS + 1, 2, 2))
        self.mlp = two_layers(3 * field, width)

    def forward(self) -> Tensor:
        return self.mlp(torch.cat([table(self.columns[:, k]) for k, table in enumerate(self.fields)], dim=1))


class Feedback(NamedTuple):
    """Logits of rating [N, 5], like [N] and love [N]."""

    rating: Tensor
    like: Tensor
    love: Tensor


class Forward(NamedTuple):
    """What one pass gives: item vectors [I, D], context [B, L, D], feedback table [6, D] or None, states [B, L + 1, D]
    (state 0 is the beginning), and the states that predict item and feedback of every event, [B, L, D]."""

    items: Tensor
    context: Tensor
    feedback: Tensor | None
    states: Tensor
    for_item: Tensor
    for_feedback: Tensor


class Argus(nn.Module):
    """`encode(batch)` once; `queries`, `feedback`, `nip_loss`, `fp_loss`, `pair_scores` and `catalogue` read it."""

    def __init__(self, config: ArgusConfig, genres: Tensor, decade: Tensor, decades: int):
        super().__init__()
        self.config = config
        width, field = config.width, config.field
        self.item_tower = ItemTower(field, width, genres, decade, decades)
        if config.inputs != "items":
            self.context_tower = ContextTower(field, width)
            self.feedback_tower = FeedbackTower(field, width)
        self.begin = nn.Parameter(torch.randn(width) * START_SCALE)
        self.position = nn.Parameter(torch.randn(config.context, width) * START_SCALE)
        if config.inputs == "triplet":
            self.kind = nn.Parameter(torch.randn(3, width) * START_SCALE)
        self.dropout = Dropout(config.dropout)
        if config.encoder == "transformer":
            sizes = {"width": width, "heads": config.heads, "layers": config.layers, "dropout": config.dropout}
            self.trunk = BiasedTransformer(BiasedConfig(**sizes))
        else:
            self.norm = nn.LayerNorm(width)
        self._heads(config)

    def _heads(self, config: ArgusConfig) -> None:
        width = config.width
        known = width if config.inputs == "items" else 2 * width  # h, and C(c_t) unless there is none
        if config.nip:
            self.query = two_layers(known + (width if config.reverse else 0), width)
            self.temperature = Temperature(START_TEMPERATURE, 0.01, 1.0)
        if config.fp:
            self.judge = two_layers(known + (0 if config.reverse else width), width, RATINGS + 2)
        if config.tower:
            self.user_tower, self.object_tower = two_layers(width, width), two_layers(width, width)

    # Encoder

    def encode(self, batch: EventBatch) -> Forward:
        items = self.item_tower()
        i = items[batch.item]  # (B, L, D)
        if self.config.inputs == "items":
            context, feedback, tokens = torch.zeros_like(i), None, i
        else:
            context, feedback = self.context_tower(batch), self.feedback_tower()
            f = feedback[batch.rating]
            if self.config.inputs == "triplet":
                return self._triplet(batch, items, context, feedback, torch.stack([context, i, f], dim=2))
            tokens = context + i + f
        x = self._with_begin(tokens + self._positions(batch))
        mask = F.pad(batch.mask, (1, 0), value=True)
        states = self.trunk(x, mask) if self.config.encoder == "transformer" else self._mean(x, mask)
        seen = _pick(states, batch.state)
        return Forward(items, context, feedback, states, seen, seen)

    def _positions(self, batch: EventBatch) -> Tensor:
        return self.position[-batch.shape[1] :]  # counted backwards from the newest event

    def _with_begin(self, tokens: Tensor) -> Tensor:
        begin = self.begin.expand(len(tokens), 1, -1)
        return self.dropout(torch.cat([begin, tokens], dim=1))

    def _mean(self, x: Tensor, mask: Tensor) -> Tensor:
        real = mask.unsqueeze(2).to(x.dtype)
        return self.norm((x * real).cumsum(1) / real.cumsum(1))

    def _triplet(self, batch: EventBatch, items: Tensor, context: Tensor, feedback: Tensor, parts: Tensor) -> Forward:
        """Tokens c_1, i_1, f_1, c_2, ...: an event's tokens see strictly earlier seconds and its own tokens before them.

        The item is predicted at the context token and the feedback at the item token, nowhere else.
        """
        windows, length = batch.shape
        parts = parts + self._positions(batch).unsqueeze(1) + self.kind
        x = self._with_begin(parts.flatten(1, 2))  # (B, 1 + 3L, D)
        second = F.pad(batch.second.repeat_interleave(3, dim=1), (1, 0), value=-2)
        event = F.pad(torch.arange(length, device=x.device).repeat_interleave(3), (1, 0), value=-1)
        kind = F.pad(torch.arange(3, device=x.device).repeat(length), (1, 0))
        earlier = second.unsqueeze(1) < second.unsqueeze(2)  # (B, row, column)
        own = (event.unsqueeze(0) == event.unsqueeze(1)) & (kind.unsqueeze(0) <= kind.unsqueeze(1))
        mask = F.pad(batch.mask.repeat_interleave(3, dim=1), (1, 0), value=True)
        hidden = self.trunk(x, mask, visible=earlier | own)
        by_kind = hidden[:, 1:].reshape(windows, length, 3, -1)
        states = torch.cat([hidden[:, :1], by_kind[:, :, 2]], dim=1)  # after the feedback token the event is complete
        return Forward(items, context, feedback, states, by_kind[:, :, 0], by_kind[:, :, 1])

    # Heads

    def queries(self, done: Forward, at: Tensor, rating: Tensor | None = None) -> Tensor:
        """u_t = MLP([h_p(t); C(c_t)]) of the events at flat places int64[N]: [N, D].

        rating: int64[N] true feedback of the reversed factorisation; without it the expected feedback embedding.
        """
        known = self._known(done.for_item, done, at)
        if self.config.reverse:
            if rating is None:
                share = torch.softmax(self._judge(known).rating, dim=1)  # (N, 5)
                given = share @ done.feedback[1:]
            else:
                given = done.feedback[rating]
            known = torch.cat([known, given], dim=1)
        return self.query(known)

    def feedback(self, done: Forward, at: Tensor, item: Tensor) -> Feedback:
        """Feedback on the items int64[N] at the events `at`, conditioned on the item unless reversed."""
        known = self._known(done.for_feedback, done, at)
        return self._judge(known if self.config.reverse else torch.cat([known, done.items[item]], dim=1))

    def _known(self, states: Tensor, done: Forward, at: Tensor) -> Tensor:
        h = states.flatten(0, 1)[at]
        return h if self.config.inputs == "items" else torch.cat([h, done.context.flatten(0, 1)[at]], dim=1)

    def _judge(self, known: Tensor) -> Feedback:
        logits = self.judge(known).float()
        return Feedback(logits[:, :RATINGS], logits[:, RATINGS], logits[:, RATINGS + 1])

    def catalogue(self, done: Forward, at: Tensor) -> Tensor:
        """Retrieval scores of all items at the events `at`, [N, I]: next-item logits, or like logits without NIP."""
        if not self.config.nip:
            return self.like_of_all(done, at)
        u = self.queries(done, at)
        with float32_region(u.device):
            return self.temperature(F.normalize(u.float(), dim=1) @ F.normalize(done.items.float(), dim=1).t())

    def like_of_all(self, done: Forward, at: Tensor) -> Tensor:
        """Like logits of every item at the events `at`, [N, I]; the first layer is applied to events and items apart."""
        known = self._known(done.for_feedback, done, at)
        first, activation, last = self.judge
        if self.config.reverse:
            return self._judge(known).like.unsqueeze(1).expand(-1, len(done.items))
        split = known.shape[1]
        by_event = F.linear(known, first.weight[:, :split], first.bias)
        by_item = F.linear(done.items, first.weight[:, split:])
        weight, bias = last.weight[RATINGS], last.bias[RATINGS]
        rows = [activation(part.unsqueeze(1) + by_item) @ weight + bias for part in by_event.split(AT_ONCE)]
        return torch.cat(rows).float()

    # Losses

    def loss(self, batch: EventBatch, log_q: Tensor) -> Tensor:
        """L_NIP + L_FP. log_q: log Q(i) of one negative, float32[I]."""
        done = self.encode(batch)
        total = self.begin.new_zeros(())
        if self.config.nip:
            total = total + self.nip_loss(done, batch, log_q)
        return total + self.fp_loss(done, batch) if self.config.fp else total

    def nip_loss(self, done: Forward, batch: EventBatch, log_q: Tensor, full: bool | None = None) -> Tensor:
        """Mean over the events with a loss. full: over the whole catalogue, default as configured.

        The reversed factorisation reads the true feedback in training mode only.
        """
        item = batch.item.flatten()[batch.at]
        given = batch.rating.flatten()[batch.at] if self.config.reverse and self.training else None
        u = self.queries(done, batch.at, given)
        with float32_region(u.device):
            u, v = F.normalize(u.float(), dim=1), F.normalize(done.items.float(), dim=1)
            if self.config.softmax == "full" if full is None else full:
                return linear_cross_entropy(self.temperature(u), v, item, first=1)
            positive = self.temperature((u * v[item]).sum(1))
            negative = self.temperature(u @ v[batch.negative].t())  # (N, M)
            own = batch.owner.unsqueeze(0) == (batch.at // batch.shape[1]).unsqueeze(1)
            usable = ~own & (batch.negative.unsqueeze(0) != item.unsqueeze(1))
            correction = {}
            if self.config.logq:
                correction = {"log_q_positive": log_q[item], "log_q_negative": log_q[batch.negative]}
            return sampled_softmax(positive, negative, usable=usable, **correction).mean()

    def fp_loss(self, done: Forward, batch: EventBatch) -> Tensor:
        """CE(rating) + BCE(like) + BCE(love), mean over the events with a loss."""
        item, rating = batch.item.flatten()[batch.at], batch.rating.flatten()[batch.at]
        said = self.feedback(done, batch.at, item)
        with float32_region(said.rating.device):
            like, love = (rating >= LIKE).float(), (rating >= LOVE).float()
            return (
                F.cross_entropy(said.rating, rating - 1)
                + F.binary_cross_entropy_with_logits(said.like, like)
                + F.binary_cross_entropy_with_logits(said.love, love)
            )

    # Two towers

    def user_vectors(self, done: Forward, batch: EventBatch, at: Tensor) -> Tensor:
        """g_u = MLP(h) of the delayed state of the events `at`, [N, D]."""
        return self.user_tower(_pick(done.states, batch.delayed).flatten(0, 1)[at])

    def object_vectors(self, done: Forward) -> Tensor:
        """g_i / sqrt(D) = MLP(I(i)) / sqrt(D) of the catalogue, [I, D]."""
        return self.object_tower(done.items) / self.config.width**0.5

    def pair_scores(self, done: Forward, batch: EventBatch) -> tuple[Tensor, Tensor]:
        """s_a and s_b of the batch's pairs, [Q] each, from one user state: that of the earlier event."""
        user, objects = self.user_vectors(done, batch, batch.earlier), self.object_vectors(done)
        item = batch.item.flatten()
        with float32_region(user.device):
            better, worse = ((user.float() * objects[item[at]].float()).sum(1) for at in (batch.better, batch.worse))
        return better, worse

    def tuning_loss(self, batch: EventBatch, log_q: Tensor) -> Tensor:
        """L_ft = softplus(-(s_a - s_b)) + 0.1 L_NIP."""
        done = self.encode(batch)
        return logistic_pairs(*self.pair_scores(done, batch)) + KEEP_RETRIEVAL * self.nip_loss(done, batch, log_q)


def _pick(states: Tensor, place: Tensor) -> Tensor:
    """states [B, L + 1, D] at place int64[B, L] -> [B, L, D]."""
    return states.gather(1, place.unsqueeze(2).expand(-1, -1, states.shape[2]))
