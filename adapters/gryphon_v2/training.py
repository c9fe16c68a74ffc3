"""Losses of the joint stage: generation, and what the ranking module learns from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.gryphon_v2.batches import CutBatch
from adapters.gryphon_v2.model import Encoded, Gryphon, distillation, merged_pool, rollout
from adapters.gryphon_v2.teacher import Teacher, feedback_loss, positives_loss
from auto_research.data.prefix import LIKE_RATING

RANKINGS = ("none", "distill", "next", "label")
POOLS = ("both", "rollout", "impression", "static", "random")


@dataclass(frozen=True)
class JointRule:
    """What is added to L_NTP.

    ranking: none, distill (MAE to the teacher on pools), next (sampled softmax of the next positives) or label (L_T, the
    teacher's own objective, without a teacher).  pool: rollouts and impressions, one of them, static (rollouts of the
    model as the stage began, and impressions) or random (uniform unseen items, and impressions).
    rollout_beam: semantic ids of a rollout.  next_positives: positives of the impression window that L_NTP and the
    softmax of 'next' and 'label' are means over; the paper's is 1, the next one.
    """

    ranking: str = "distill"
    pool: str = "both"
    lambda_r: float = 1.0
    rollout_beam: int = 8
    rollout_items: int = 12
    next_positives: int = 1

    def __post_init__(self) -> None:
        if self.ranking not in RANKINGS or self.pool not in POOLS:
            raise ValueError(f"unknown ranking {self.ranking!r} or pool {self.pool!r}")


class JointLoss:
    """L = L_NTP + lambda_r L_rank as a function of (model, batch).

    teacher: frozen, for ranking='distill'.  start: frozen copy of the model at the start, for pool='static'.
    """

    def __init__(self, rule: JointRule, teacher: Teacher | None = None, start: Gryphon | None = None):
        self.rule, self.teacher, self.start = rule, teacher, start

    def __call__(self, model: Gryphon, batch: CutBatch) -> Tensor:
        encoded = model.encode(batch.history, rank=self.rule.ranking != "none")
        loss = model.generation_loss(encoded, next_positives(batch.event, batch.rating, self.rule.next_positives))
        if self.rule.ranking == "none":
            return loss
        return loss + self.rule.lambda_r * self.ranking_loss(model, encoded, batch)

    def ranking_loss(self, model: Gryphon, encoded: Encoded, batch: CutBatch) -> Tensor:
        if self.rule.ranking == "distill":
            pool = self.pool(model, batch)
            return distillation(model.rank(model.rows(encoded, batch.pools), pool), self.taught(batch, pool), pool)
        count = self.rule.next_positives
        event = batch.event if self.rule.ranking == "label" else next_positives(batch.event, batch.rating, count)
        scores = model.rank(encoded, torch.cat([event, batch.negative], dim=1))
        own, negative = scores[:, : event.shape[1]], scores[:, event.shape[1] :]
        if self.rule.ranking == "label":
            return feedback_loss(own, batch.rating, negative, count)
        return positives_loss(own, event > 0, negative)

    def pool(self, model: Gryphon, batch: CutBatch) -> Tensor:
        """C_rollout and C_impression int64 [R, K] without repeats, 0 padded; nothing here has a gradient."""
        rule, impression = self.rule, batch.event[: batch.pools]
        if rule.pool == "impression":
            return merged_pool(impression)
        if rule.pool == "random":
            return merged_pool(batch.uniform, impression)
        history = type(batch.history)(*(x[: batch.pools] for x in batch.history))
        generator = self.start if rule.pool == "static" else model
        found = rollout(generator, history, batch.seen, width=rule.rollout_beam, count=rule.rollout_items)
        return merged_pool(found) if rule.pool == "rollout" else merged_pool(found, impression)

    @torch.no_grad()
    def taught(self, batch: CutBatch, pool: Tensor) -> Tensor:
        """Standardised teacher scores of a pool, from the teacher's longer history strictly before the cut."""
        return self.teacher.score(self.teacher.read(batch.long), pool)


def next_positives(event: Tensor, rating: Tensor, count: int) -> Tensor:
    """The first `count` positives int64 [B, count] of windows int64 [B, W] with their ratings, filled up with 0."""
    liked = rating >= LIKE_RATING
    order = torch.sort((~liked).int(), dim=1, stable=True).indices[:, :count]
    return event.masked_fill(~liked, 0).gather(1, order)
