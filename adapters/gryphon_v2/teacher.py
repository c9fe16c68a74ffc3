"""The training-only teacher: a longer history, and candidates that read it in every layer.

    L_T = sum_{r_i > r_j} |r_i - r_j| softplus(-(s_i - s_j)) / sum |r_i - r_j|  +  CE(positives against unseen items)

The pairs are of one impression window (the logged events from the cut on); the second term, the mean over its first
positives (one in the card), makes scores of items that were never shown comparable with them.
Shapes: B cuts, N events, C candidates, W events of a window, M negatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapters.gryphon_v2.batches import CutBatch
from adapters.gryphon_v2.events import EventWindow
from adapters.gryphon_v2.model import EventTokens, ItemTable
from auto_research.blocks.biased_transformer import BiasedConfig, BiasedTransformer, KeyValueCache
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.pairwise_loss import logistic_pairs
from auto_research.blocks.sampled_softmax import multi_positive_softmax
from auto_research.data.prefix import LIKE_RATING
from auto_research.runtime.precision import float32_region


@dataclass(frozen=True)
class TeacherConfig:
    """long_history: events read (N)."""

    width: int = 96
    heads: int = 4
    layers: int = 3
    dropout: float = 0.2
    long_history: int = 200


class Teacher(nn.Module):
    """`read(window)` once, `score(cache, item [B, C])` per candidate; raw scores until `standardise` was called."""

    def __init__(self, config: TeacherConfig, text: Tensor):
        super().__init__()
        self.config = config
        self.table = ItemTable(text, config.width)
        self.events = EventTokens(config.long_history, config.width)
        self.candidate = nn.Parameter(torch.zeros(config.width))
        self.trunk = BiasedTransformer(
            BiasedConfig(config.width, config.heads, config.layers, dropout=config.dropout, times=0)
        )
        self.dropout = Dropout(config.dropout)
        self.out = nn.Linear(config.width, 1)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    def read(self, window: EventWindow) -> tuple[KeyValueCache, Tensor]:
        """Keys and values of a history, which never reads a candidate, and the item vectors."""
        items = self.table()
        return self.trunk.cache(self.dropout(self.events(items, window)), window.mask), items

    def score(self, read: tuple[KeyValueCache, Tensor], item: Tensor) -> Tensor:
        """s_T float32 [B, C] of items int64 [B, C], each the last token of its own copy of the history."""
        cache, items = read
        batch, count = item.shape
        request_of = torch.arange(batch, device=item.device).repeat_interleave(count)
        token = self.dropout(items[item.flatten()] + self.candidate)
        states = self.trunk.candidates(token, cache, request_of)
        return (self.out(states).float().view(batch, count) - self.mean) / self.std

    def loss(self, batch: CutBatch, positives: int = 1) -> Tensor:
        """L_T of a batch with long histories for all of its rows; positives as in `feedback_loss`."""
        scores = self.score(self.read(batch.long), torch.cat([batch.event, batch.negative], dim=1))
        width = batch.event.shape[1]
        return feedback_loss(scores[:, :width], batch.rating, scores[:, width:], positives)

    def set_scale(self, scores: Tensor) -> None:
        """Standardise later scores by mean and deviation of these."""
        self.mean.copy_(scores.mean())
        self.std.copy_(scores.std().clamp(min=1e-6))


def feedback_loss(event: Tensor, rating: Tensor, negative: Tensor, positives: int = 1) -> Tensor:
    """L_T of scores event [B, W] with ratings int64 [B, W] (0 = none, column 0 the next positive), negative [B, M].

    positives: how many positives of a window stand against the negatives, in the order of time.
    """
    liked = rating >= LIKE_RATING
    counted = liked & (liked.cumsum(1) <= positives)
    return pair_loss(event, rating) + positives_loss(event, counted, negative)


def positives_loss(positive: Tensor, real: Tensor, negative: Tensor) -> Tensor:
    """Softmax of every score of positive [B, K] that real bool[B, K] marks against negative [B, M].

    The mean over the positives of a row, then over rows.
    """
    usable = torch.ones_like(negative, dtype=torch.bool)
    return multi_positive_softmax(positive, real, negative, usable).mean()


def pair_loss(score: Tensor, rating: Tensor) -> Tensor:
    """Weighted logistic loss of all pairs of a window, pooled over the batch."""
    with float32_region(score.device):
        weight = (rating.unsqueeze(2) - rating.unsqueeze(1)).clamp(min=0) * (rating > 0).unsqueeze(1)
        better, worse = torch.broadcast_tensors(score.float().unsqueeze(2), score.float().unsqueeze(1))
        return logistic_pairs(better, worse, weight.float())


def weighted_pair_accuracy(score: Tensor, rating: Tensor) -> tuple[Tensor, Tensor]:
    """Right weight and total weight |r_i - r_j| over the pairs of every window, float64 [B] each; ties count half."""
    weight = ((rating.unsqueeze(2) - rating.unsqueeze(1)).clamp(min=0) * (rating > 0).unsqueeze(1)).double()
    difference = score.unsqueeze(2) - score.unsqueeze(1)
    right = (difference > 0).double() + 0.5 * (difference == 0).double()
    return (weight * right).sum((1, 2)), weight.sum((1, 2))
