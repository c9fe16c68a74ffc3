"""Feedback labels of events and the policy objectives that learn from them.

    A = -1 where disliked, +1 where q >= .75, else 0                    (duration-aware reward shaping, data.rewards)
    D = max(pi_old, sg pi) for A > 0,  max(pi_old, 1 - sg pi) for A < 0
    L_GBPO = - mean(pi / D A),   L = L_NTP + lambda_rl L_GBPO

pi is the product of the code probabilities; with level 'token' the rule holds for every code and is averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adapters.onerec_v2.events import EventStream, StreamBatch
from adapters.onerec_v2.model import OneRecV2
from auto_research.blocks.preference import ecpo, frozen_reference, gbpo, grpo
from auto_research.blocks.sid_models import without_dropout
from auto_research.data.rewards import Events, rating_quantile_reward, raw_reward
from auto_research.runtime.errors import ConfigError

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
UNCLIPPED = 1e6
OBJECTIVES: dict[str, Objective] = {
    "gbpo": gbpo,
    "ppo_clip": lambda logp, old, advantage: grpo(logp, old, advantage, clip=0.2),
    "ecpo": lambda logp, old, advantage: ecpo(logp, old, advantage, clip=0.2, slack=0.1),
    "unclipped": lambda logp, old, advantage: -(torch.exp((logp - old.detach()).clamp(max=20.0)) * advantage),
}
LEVELS = ("sequence", "token")


@dataclass(frozen=True)
class PolicyConfig:
    """objective of OBJECTIVES, or 'none' (supervised control).  level: 'sequence' or 'token'.  reward: 'shaped' or 'raw'.

    updates of the policy; refresh: updates between snapshots; weight lambda_rl; rate: learning rate.
    """

    objective: str = "gbpo"
    level: str = "sequence"
    reward: str = "shaped"
    updates: int = 200
    refresh: int = 25
    weight: float = 0.5
    rate: float = 1e-4

    def __post_init__(self) -> None:
        if self.objective not in (*OBJECTIVES, "none") or self.level not in LEVELS:
            raise ConfigError(f"unknown objective {self.objective!r} or level {self.level!r}")
        if self.reward not in ("shaped", "raw"):
            raise ConfigError(f"unknown reward {self.reward!r}; known: shaped, raw")


def labels(stream: EventStream, reward: str = "shaped") -> np.ndarray:
    """A int64[N] of all rows; reference distributions are those of the train rows alone."""
    rows = np.arange(len(stream.item))
    rating = stream.rating(rows).astype(np.float64)
    if reward == "raw":
        return raw_reward(rating)
    train, data = stream.train, stream.interactions
    fitted = rating_quantile_reward(
        Events(stream.user(train), stream.item[train], rating[train], data.n_users, data.n_items)
    )
    return fitted.label(stream.user(rows), stream.item, rating)


class Snapshot:
    """The frozen policy pi_old, renewed every `refresh` updates; a part of the training state."""

    def __init__(self, model: OneRecV2, refresh: int):
        self.model, self.refresh = frozen_reference(model), refresh

    def after_step(self, model: nn.Module, step: int) -> None:
        if step % self.refresh == 0:
            self.model.load_state_dict(model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


def ntp_loss(model: OneRecV2, batch: StreamBatch) -> Tensor:
    """L_NTP: mean over samples and codes."""
    return -model.token_logp(batch.context, batch.target).mean()


def policy_loss(model: OneRecV2, snapshot: OneRecV2, batch: StreamBatch, config: PolicyConfig) -> Tensor:
    """Mean objective over the rows with A != 0, 0 without one; dropout is off on both sides."""
    rows = batch.advantage != 0
    context = type(batch.context)(*(x[rows] for x in batch.context))
    target, advantage = batch.target[rows], batch.advantage[rows].float()
    if not len(target):
        return 0.0 * model.sid.embedding.weight.sum()
    with without_dropout(model):
        now = model.token_logp(context, target)
    with torch.no_grad():
        old = snapshot.token_logp(context, target)
    if config.level == "sequence":
        now, old = now.sum(1), old.sum(1)
    else:
        advantage = advantage.unsqueeze(1)
    return OBJECTIVES[config.objective](now, old, advantage).mean()


def post_training_loss(model: OneRecV2, snapshot: OneRecV2, batch: StreamBatch, config: PolicyConfig) -> Tensor:
    """L_NTP + lambda_rl L_RL on one batch."""
    loss = ntp_loss(model, batch)
    if config.objective == "none":
        return loss
    return loss + config.weight * policy_loss(model, snapshot, batch, config)


class LargestGradient:
    """The largest gradient norm of L_RL alone, without lambda_rl and clipping, over every `every`-th step from the first."""

    def __init__(self, snapshot: Snapshot, config: PolicyConfig, every: int = 5):
        self.snapshot, self.config, self.every = snapshot, config, every
        self.step, self.value = 0, 0.0

    def __call__(self, model: OneRecV2, batch: StreamBatch) -> None:
        self.step += 1
        if (self.step - 1) % self.every:
            return
        loss = policy_loss(model, self.snapshot.model, batch, self.config)
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        norm = torch.stack([gradient.norm() for gradient in found if gradient is not None]).norm()
        self.value = max(self.value, float(norm))

    def state_dict(self) -> dict[str, float]:
        return {"step": self.step, "value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.step, self.value = state["step"], state["value"]
