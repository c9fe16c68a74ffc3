"""Cascades: two models that encode the user twice. Same interface as UniR2: outputs, rank, catalogue, serve and its parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from adapters.unir2.events import Requests
from adapters.unir2.features import RANKING_TOKENS, ItemFacts, PrefixTokens, RankingTokens
from adapters.unir2.model import GENERATED, TASKS, Retrieved, Served, UniR2
from auto_research.baselines.sasrec import SASRec
from auto_research.blocks.activation_unit import AttentionPooling
from auto_research.blocks.causal_transformer import TransformerConfig
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.softmax_loss import linear_cross_entropy
from auto_research.metrics.cost import count_params
from auto_research.runtime.errors import ConfigError

TOLERANCE = 0.05


class Cascade(nn.Module):
    """What serves in two steps: `retrieve`, then `rank_found`, which encodes the user again."""

    def rank(self, request: Requests, item: Tensor) -> Tensor:
        """Task logits [B, w, tasks] of items int64 [B, w]."""
        raise NotImplementedError

    def retrieve(self, request: Requests, seen: Tensor, *, width: int) -> Retrieved:
        """The `width` unseen items that recall likes best."""
        raise NotImplementedError

    @torch.no_grad()
    def rank_found(self, request: Requests, found: Retrieved) -> Tensor:
        return self.rank(request, found.item)

    def serve(self, request: Requests, seen: Tensor, *, width: int) -> Served:
        found = self.retrieve(request, seen, width=width)
        return Served(found.item, found.logp, self.rank_found(request, found))


class TwoStage(Cascade):
    """gr_plus_ranker: a generator of semantic ids, and a Transformer ranker with tables, prefix and trunk of its own."""

    def __init__(self, generator: UniR2, ranker: UniR2):
        super().__init__()
        self.recall, self.ranker = generator, ranker

    def outputs(self, batch) -> tuple[Tensor, Tensor]:
        return self.recall.outputs(batch)[0], self.ranker.outputs(batch)[1]

    def rank(self, request: Requests, item: Tensor) -> Tensor:
        return self.ranker.rank(request, item)

    @torch.no_grad()
    def catalogue(self, request: Requests, chunk: int = 256) -> tuple[Tensor, Tensor]:
        items = torch.arange(len(self.recall.codes), device=request.item.device).expand(len(request.item), -1)
        tasks = [self.ranker.rank(request, part) for part in items.split(chunk, dim=1)]
        return self.recall.catalogue(request, chunk)[0], torch.cat(tasks, dim=1)

    def retrieve(self, request: Requests, seen: Tensor, *, width: int) -> Retrieved:
        return self.recall.retrieve(request, seen, width=width)


@dataclass(frozen=True)
class DinConfig:
    """Sizes of the SASRec and DIN cascade; inner: of SASRec's feed-forward layers; hidden: of the ranker's first layer."""

    width: int = 64
    heads: int = 2
    layers: int = 2
    inner: int = 128
    hidden: int = 128
    dropout: float = 0.2
    history: int = 30


class DinRanker(nn.Module):
    """Target attention over the same events and the same candidate features as UniR2 has; logits [B, w, tasks].

    Events and candidates have one table of items and of genres, as DIN has.
    """

    def __init__(self, facts: ItemFacts, config: DinConfig):
        super().__init__()
        width = config.width
        self.prefix, self.tokens = PrefixTokens(facts, config.history, width), RankingTokens(facts, width)
        self.tokens.item, self.tokens.genre = self.prefix.item, self.prefix.genre
        self.attention = AttentionPooling(width, longest=config.history, hidden=(32, 16))
        inputs = (3 + len(facts.profile) + RANKING_TOKENS) * width
        self.mlp = nn.Sequential(
            *(Dropout(config.dropout), nn.Linear(inputs, config.hidden), nn.GELU()),
            *(nn.Linear(config.hidden, 64), nn.GELU(), nn.Linear(64, len(TASKS))),
        )

    def forward(self, request: Requests, item: Tensor, own: Tensor | None = None) -> Tensor:
        x, mask = self.prefix(request)
        profile = x.shape[1] - request.item.shape[1]
        who, events = x[:, :profile].flatten(1), x[:, profile:]
        token = self.tokens(request, item, own).flatten(0, 1)  # (B w, R, D)
        key = token[:, 0] + token[:, 1]
        request_of = torch.arange(len(item), device=item.device).repeat_interleave(item.shape[1])
        pooled = self.attention(events, mask[:, profile:], key, request_of)
        row = torch.cat([pooled, key, pooled * key, who[request_of], token.flatten(1)], dim=1)
        return self.mlp(row).float().view(*item.shape, len(TASKS))


class SasrecDin(Cascade):
    """sasrec_plus_din: SASRec retrieves, DIN ranks. Recall learns every event of a window that was rated at least 3."""

    def __init__(self, facts: ItemFacts, config: DinConfig):
        super().__init__()
        sizes = TransformerConfig(config.width, config.heads, config.layers, config.inner, config.dropout)
        self.recall = SASRec(len(facts.genres) - 1, config.history, sizes)
        self.ranker = DinRanker(facts, config)

    def outputs(self, batch) -> tuple[Tensor, Tensor]:
        request = batch.request
        target = torch.cat([request.item[:, 1:], batch.item[:, :1]], dim=1)
        rating = torch.cat([request.rating[:, 1:], batch.rating[:, None]], dim=1)
        real = (request.item > 0) & (rating >= GENERATED)
        loss = linear_cross_entropy(self.recall(request.item)[real], self.recall.item_table(), target[real], first=1)
        return loss, self.ranker(request, batch.item, batch.own)

    def rank(self, request: Requests, item: Tensor) -> Tensor:
        return self.ranker(request, item)

    def _logp(self, request: Requests) -> Tensor:
        scores = self.recall(request.item)[:, -1].float() @ self.recall.item_table().float().t()
        scores[:, 0] = -torch.inf
        return scores.log_softmax(1)

    @torch.no_grad()
    def catalogue(self, request: Requests, chunk: int = 256) -> tuple[Tensor, Tensor]:
        logp = self._logp(request)
        items = torch.arange(logp.shape[1], device=logp.device).expand(len(logp), -1)
        return logp, torch.cat([self.ranker(request, part) for part in items.split(chunk, dim=1)], dim=1)

    @torch.no_grad()
    def retrieve(self, request: Requests, seen: Tensor, *, width: int) -> Retrieved:
        logp = self._logp(request).scatter(1, seen, -torch.inf)
        best, item = logp.topk(min(width, logp.shape[1]), dim=1)
        return Retrieved(item.masked_fill(best == -torch.inf, 0), best)


def matched_din(goal: int, facts: ItemFacts, config: DinConfig) -> DinConfig:
    """The cascade whose first hidden layer brings it to `goal` parameters. ConfigError when none comes within 5%."""
    small, large = (count_params(SasrecDin(facts, replace(config, hidden=h))) for h in (8, 9))
    made = replace(config, hidden=max(8, 8 + round((goal - small) / (large - small))))
    count = small + (made.hidden - 8) * (large - small)
    if abs(count - goal) > TOLERANCE * goal:
        raise ConfigError(
            f"the smallest cascade of width {config.width} has {count} parameters, not {goal}: lower `inner`"
        )
    return made
