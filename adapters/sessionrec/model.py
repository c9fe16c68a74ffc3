"""SessionRec (arXiv:2502.10157): sessions in, all positives of the next session out.

    e_i = MLP([E_id; G genres; E_decade])      x_i = e_i + sign            items of a visit
    s_t = mean_{i in S_t} x_i                                              item-based session encoder (ISE)
    q_t = SSE(s_1 .. s_t)_t                                                session-based sequence encoder (SSE)
    L   = L_ret(q_t, P_{t+1}) + alpha L_rank(q_t, P_{t+1}, N_{t+1})

Tokens and events are flat (batches.py); a grid exists only where the sequence encoder needs one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.sessionrec.batches import SessionBatch
from adapters.sessionrec.sessions import GAP_BUCKETS
from auto_research.blocks.causal_transformer import CausalTransformer, TransformerConfig
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.hstu import Hstu, HstuConfig
from auto_research.blocks.pairs import from_grid, to_grid
from auto_research.blocks.pairwise_loss import all_pairs
from auto_research.blocks.sampled_softmax import Temperature, multi_positive_softmax
from auto_research.runtime.precision import float32_region

POOLINGS = ("mean", "attention", "transformer", "last")
ENCODERS = ("transformer", "hstu")
START_SCALE = 0.02
ID_SCALE = 8.0  # ids start with unit variance and still move this many learning rates a step
START_TEMPERATURE = 0.1
SIGNS = 3  # padding, positive, negative


@dataclass(frozen=True)
class SessionRecConfig:
    """Sizes and switches.

    field: width of the id part; genres and decade have half of it.  encoder: transformer | hstu.  pooling: mean |
    attention | transformer | last.  id_only: items without genres and decade.  alpha: weight of the rank loss.
    negatives: sampled | full softmax.  pauses: False leaves the pause between tokens out.  tokens: longest sequence.
    """

    width: int = 64
    field: int = 32
    layers: int = 2
    heads: int = 4
    dropout: float = 0.3
    encoder: str = "transformer"
    pooling: str = "mean"
    id_only: bool = False
    pauses: bool = True
    alpha: float = 0.1
    negatives: str = "sampled"
    tokens: int = 50

    def __post_init__(self) -> None:
        if self.encoder not in ENCODERS or self.pooling not in POOLINGS or self.negatives not in ("sampled", "full"):
            raise ValueError(f"unknown encoder, pooling or negatives in {self}")


class ItemEmbedding(nn.Module):
    """e_i of every item, [n_items + 1, D]: input vector and output candidate alike. genres [n_items + 1, G]."""

    def __init__(self, config: SessionRecConfig, genres: Tensor, decade: Tensor, decades: int):
        super().__init__()
        self.id_only = config.id_only
        side = 0 if config.id_only else config.field // 2
        self.item = _scaled_table(len(genres), config.field)
        if side:
            self.register_buffer("genres", genres.float(), persistent=False)
            self.register_buffer("decade_of", decade.long(), persistent=False)
            self.genre = nn.Linear(genres.shape[1], side, bias=False)
            self.decade = _scaled_table(decades, side)
        width = config.width
        self.mlp = nn.Sequential(nn.Linear(config.field + 2 * side, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self) -> Tensor:
        parts = [self.item.weight * ID_SCALE]
        if not self.id_only:
            parts += [self.genre(self.genres), self.decade(self.decade_of) * ID_SCALE]
        return self.mlp(torch.cat(parts, dim=1))


def _scaled_table(rows: int, width: int) -> nn.Embedding:
    table = nn.Embedding(rows, width)
    nn.init.normal_(table.weight, std=1 / ID_SCALE)
    return table


class SessionEncoder(nn.Module):
    """ISE: x [E, D] of events with token_of int64[E] -> s [N, D]. Only 'last' knows the order inside a session."""

    def __init__(self, config: SessionRecConfig):
        super().__init__()
        self.pooling = config.pooling
        if config.pooling == "attention":
            self.query = nn.Parameter(torch.randn(config.width) * START_SCALE)
        elif config.pooling == "transformer":
            self.block = nn.TransformerEncoderLayer(
                config.width, 2, 2 * config.width, dropout=0.0, batch_first=True, norm_first=True
            )

    def forward(self, x: Tensor, token_of: Tensor, tokens: int) -> Tensor:
        grid, mask = to_grid(x, token_of, tokens)  # (N, M, D), events of a token contiguous
        if self.pooling == "last":
            return grid[torch.arange(tokens, device=x.device), mask.sum(1) - 1]
        if self.pooling == "attention":
            with float32_region(x.device):
                scores = (grid.float() @ self.query.float()).masked_fill(~mask, -torch.inf)
                weight = torch.softmax(scores, dim=1)
            return (weight.to(x.dtype).unsqueeze(2) * grid).sum(1)
        if self.pooling == "transformer":
            grid = self.block(grid, src_key_padding_mask=~mask)
        real = mask.unsqueeze(2).to(x.dtype)
        return (grid * real).sum(1) / real.sum(1).clamp(min=1)


class SequenceEncoder(nn.Module):
    """SSE: s [N, D], user int64[N], gap int64[N] -> q [N, D]; causal, positions counted forwards from the oldest token.

    Sequences are padded on the right, where no token looks: no row of the attention is ever empty.
    """

    def __init__(self, config: SessionRecConfig):
        super().__init__()
        self.position = nn.Parameter(torch.randn(config.tokens, config.width) * START_SCALE)
        self.gap = nn.Embedding(GAP_BUCKETS, config.width) if config.pauses else None
        if self.gap is not None:
            nn.init.normal_(self.gap.weight, std=START_SCALE)
        self.dropout = Dropout(config.dropout)
        sizes = {"width": config.width, "heads": config.heads, "layers": config.layers, "dropout": config.dropout}
        self.hstu = config.encoder == "hstu"
        if self.hstu:
            self.trunk = Hstu(HstuConfig(**sizes, bias="relative", positions=config.tokens, times=0))
            self.norm = nn.LayerNorm(config.width)
        else:
            self.trunk = CausalTransformer(TransformerConfig(**sizes))

    def forward(self, s: Tensor, user: Tensor, gap: Tensor, users: int) -> Tensor:
        if self.gap is not None:
            s = s + self.gap(gap)
        grid, mask = to_grid(s, user, users)  # (B, T, D)
        x = self.dropout(grid + self.position[: grid.shape[1]])
        x = self.norm(self.trunk(x, mask)) if self.hstu else self.trunk(x, mask)
        return from_grid(x, user)


class SessionRec(nn.Module):
    """`queries(batch)` -> q [N, D], one per token; `scores(q)` -> q . e / tau of the whole catalogue, unit vectors."""

    def __init__(self, config: SessionRecConfig, genres: Tensor, decade: Tensor, decades: int):
        super().__init__()
        self.config = config
        self.items = ItemEmbedding(config, genres, decade, decades)
        self.sign = nn.Embedding(SIGNS, config.width, padding_idx=0)
        nn.init.normal_(self.sign.weight, std=START_SCALE)
        self.ise = SessionEncoder(config)
        self.sse = SequenceEncoder(config)
        self.temperature = Temperature(START_TEMPERATURE)

    def queries(self, batch: SessionBatch, items: Tensor | None = None) -> Tensor:
        """items: e [n_items + 1, D] when they are at hand."""
        items = self.items() if items is None else items
        x = items[batch.item] + self.sign(batch.sign)  # (E, D)
        s = self.ise(x, batch.token_of, batch.tokens)  # (N, D)
        return self.sse(s, batch.user, batch.gap, batch.users)

    def scores(self, q: Tensor, items: Tensor) -> Tensor:
        """[R, D] and [I, D] -> [R, I]."""
        with float32_region(q.device):
            return self.temperature(F.normalize(q.float(), dim=1) @ F.normalize(items.float(), dim=1).t())

    def forward(self, batch: SessionBatch) -> Tensor:
        """Scores of the catalogue after the newest token of every user, [B, n_items + 1]; column 0 is padding."""
        items = self.items()
        return self.scores(self.queries(batch, items)[batch.last()], items)

    @torch.no_grad()
    def export(self) -> tuple[Tensor, Tensor]:
        """What serving stores: item vectors as inputs and as unit candidates, both [n_items + 1, D]."""
        items = self.items()
        return items, F.normalize(items.float(), dim=1)

    @torch.no_grad()
    def retrieve(self, batch: SessionBatch, items: Tensor, candidates: Tensor, seen: Tensor, k: int) -> Tensor:
        """int64[B, k] best items after the newest token, best first.

        items, candidates: from `export`.  seen: bool[B, n_items + 1], items left out.
        """
        query = F.normalize(self.queries(batch, items)[batch.last()].float(), dim=1)
        cosine = (query @ candidates.t()).masked_fill(seen, -torch.inf)
        cosine[:, 0] = -torch.inf
        return cosine.topk(k, dim=1).indices

    def loss(self, batch: SessionBatch, share: Tensor) -> Tensor:
        """L_ret + alpha L_rank, means over the target sessions of the batch. share: f_i of train targets, [n_items + 1]."""
        items = self.items()
        q = self.queries(batch, items)[batch.state]  # (R, D)
        scores = self.scores(q, items)
        retrieval = self._retrieval(scores, batch, share)
        if not self.config.alpha:
            return retrieval.mean()
        rank = all_pairs(*_of(scores, batch.aim), *_of(scores, batch.wrong))
        return (retrieval + self.config.alpha * rank).mean()

    def _retrieval(self, scores: Tensor, batch: SessionBatch, share: Tensor) -> Tensor:
        positive, mask = _of(scores, batch.aim)
        usable = ~excluded(batch)
        if self.config.negatives == "full":
            return multi_positive_softmax(positive, mask, scores, usable)
        owner = batch.user[batch.state]
        count, expected = negative_counts(batch, share)
        log_q = expected.clamp(min=torch.finfo(torch.float32).tiny).log() - count.clamp(min=1).log()
        usable = usable & (count > 0)[owner]
        return multi_positive_softmax(positive, mask, scores, usable, log_q_negative=log_q[owner])


def negative_counts(batch: SessionBatch, share: Tensor) -> tuple[Tensor, Tensor]:
    """How often each item is a negative of a user's targets, and how often both proposals together would give it.

    Both [B, n_items + 1]. Negatives are the uniform items of the step and the positives of the batch's other users.
    There are more draws than items, so they are counted instead of listed: a sum over draws of e^{s - log Q} is the sum
    over items of count e^s / expected, an unbiased estimate of the sum over the catalogue. share: f_i, [n_items + 1].
    """
    n = len(batch.drawn)
    cell = batch.user[batch.state].unsqueeze(1) * n + batch.pos
    own = torch.zeros(batch.users * n, device=cell.device)
    own = own.index_add_(0, cell.flatten(), (batch.pos > 0).float().flatten()).reshape(batch.users, n)
    total = own.sum(0)
    size = (total.sum() - own.sum(1)).unsqueeze(1)
    return total - own + batch.drawn, size * share + batch.drawn.sum() / (n - 1)


def excluded(batch: SessionBatch) -> Tensor:
    """bool[R, n_items + 1]: padding, and the items of the target session, which are never its negatives."""
    table = torch.zeros(len(batch.state), len(batch.drawn), dtype=torch.bool, device=batch.pos.device)
    table[:, 0] = True
    return table.index_put((batch.skip_of, batch.skip), torch.ones_like(batch.skip, dtype=torch.bool))


def _of(scores: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of listed items and which of them are no padding, both [R, K]."""
    return scores.gather(1, items), items > 0
