"""Personalised reward of a session, its training rows, and the gate it has to pass.

    u = mean pool of a one-layer encoder over H,  e_i = v_i * u,  h = SelfAttention([e_1 .. e_m])
    r_x = Tower_x(sum_i h_i)  for x in swt, vtr, wtr, ltr,   R = mean of the four

The attention has no positions, so the order of a session does not count. Items never rated count 0 in every label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.onerec.sessions import SessionSplit, histories
from auto_research.blocks.biased_transformer import BiasedConfig, BiasedTransformer
from auto_research.data.rewards import SESSION_LABELS, session_labels
from auto_research.data.sequences import fixed_user_order
from auto_research.runtime.precision import float32_region
from auto_research.runtime.seeds import stable_rng

GATE = 0.65
HELD_OUT = 0.1  # of the users
CHUNK = 512
START = 0.3  # spread of item vectors: from 1, 400 steps did not reach the gate


@dataclass(frozen=True)
class RewardConfig:
    """reward_width: of embeddings, encoder and attention.  towers: hidden sizes.  history: events of H."""

    reward_width: int = 64
    heads: int = 4
    towers: tuple[int, ...] = (64, 32)
    dropout: float = 0.1
    history: int = 40


class RewardModel(nn.Module):
    """history int64[B, n], sessions int64[B, w, m] -> logits [B, w, 4] of r_swt, r_vtr, r_wtr, r_ltr."""

    def __init__(self, n_items: int, config: RewardConfig):
        super().__init__()
        width = config.reward_width
        self.item = nn.Embedding(n_items + 1, width, padding_idx=0)
        nn.init.normal_(self.item.weight, std=START)
        with torch.no_grad():
            self.item.weight[0].zero_()
        stack = BiasedConfig(width, config.heads, layers=1, hidden=2 * width, dropout=config.dropout)
        self.encoder, self.together = BiasedTransformer(stack), BiasedTransformer(stack)
        self.towers = nn.ModuleList(_tower(width, config.towers) for _ in SESSION_LABELS)

    def user(self, history: Tensor) -> Tensor:
        """u [B, D]."""
        mask = history > 0
        visible = mask.unsqueeze(1).expand(-1, mask.shape[1], -1)
        states = self.encoder(self.item(history), mask, visible=visible) * mask.unsqueeze(2)
        return states.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)

    def forward(self, history: Tensor, sessions: Tensor) -> Tensor:
        return self.judge(self.user(history), sessions)

    def judge(self, user: Tensor, sessions: Tensor) -> Tensor:
        """Logits [B, w, 4] of sessions for users u [B, D]."""
        e = (self.item(sessions) * user[:, None, None]).flatten(0, 1)  # (B * w, m, D)
        rows, length, _ = e.shape
        everything = torch.ones(rows, length, length, dtype=torch.bool, device=e.device)
        total = self.together(e, everything[:, 0], visible=everything).sum(1)
        return torch.cat([tower(total) for tower in self.towers], dim=1).view(*sessions.shape[:2], -1)

    def loss(self, batch: RewardBatch) -> Tensor:
        """L_RM summed over the four labels, mean over sessions."""
        logits = self(batch.history, batch.sessions)
        with float32_region(logits.device):
            loss = F.binary_cross_entropy_with_logits(logits.float(), batch.labels, reduction="none")
        return loss.sum(-1).mean()


def _tower(width: int, hidden: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inside, outside in zip((width, *hidden), hidden, strict=False):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], 1))


class RewardBatch(NamedTuple):
    """history int64[B, n], sessions int64[B, 2, m] (logged, synthetic), labels float32[B, 2, 4]."""

    history: Tensor
    sessions: Tensor
    labels: Tensor

    def to(self, device: torch.device | str) -> RewardBatch:
        return RewardBatch(*(x.to(device) for x in self))


@torch.no_grad()
def rewards(model: RewardModel, history: np.ndarray, sessions: np.ndarray, device: torch.device) -> np.ndarray:
    """r float32[U, N, 4] of sessions int64[U, N, m] given histories int64[U, n]; R is the mean of the last axis."""
    model.eval()
    parts = []
    for start in range(0, len(history), CHUNK):
        rows = slice(start, start + CHUNK)
        logits = model(torch.from_numpy(history[rows]).to(device), torch.from_numpy(sessions[rows]).to(device))
        parts.append(logits.float().sigmoid().cpu().numpy())
    return np.concatenate(parts)


def held_out_users(data: SessionSplit) -> np.ndarray:
    """bool[U]: users whose sessions neither train the reward model nor make preference pairs."""
    return np.isin(data.users, _held_out(data))


def gate_users(data: SessionSplit) -> np.ndarray:
    """bool[U]: the half of them for the gate; the other half chooses among the looks of the reward's training."""
    held = _held_out(data)
    return np.isin(data.users, held[len(held) // 2 :])


def _held_out(data: SessionSplit) -> np.ndarray:
    order = fixed_user_order(data.interactions.dataset, data.interactions.n_users)
    return order[np.isin(order, data.users)][::-1][: max(2, int(len(data) * HELD_OUT))]


class RewardRows:
    """Logged train sessions and synthetic ones in which q items were replaced by items the user never rated.

    pool: int64[U, P] items that the generator made for each user (0 = none); half of the replacements come from it, the
    others are drawn by train popularity. Everything is a function of (seed, step).
    """

    def __init__(self, data: SessionSplit, pool: np.ndarray, *, history: int, batch: int, seed: int):
        self.data, self.pool, self.history, self.batch, self.seed = data, pool, history, batch, seed
        self.start, self.owner = data.windows()
        self.held, self.gate = held_out_users(data)[self.owner], gate_users(data)[self.owner]
        share = data.popularity[1:].astype(np.float64)
        self.popular = np.cumsum(share / share.sum())
        known = data.interactions.n_users + 1, data.n_items + 1
        self.rated = np.zeros(known, dtype=bool)
        rows = data.train_rows
        self.rated[data.interactions.user[rows], data.interactions.item[rows]] = True

    def training(self, step: int) -> RewardBatch:
        """A batch of the users that are not held out."""
        rng = stable_rng("reward-rows", self.seed, step)
        rows = rng.choice(np.flatnonzero(~self.held), self.batch)
        sessions, ratings, history = self.logged(rows)
        replaced = rng.integers(1, sessions.shape[1] + 1, len(rows))
        synthetic, none = self.replace(rows, sessions, replaced, rng)
        labels = np.stack([session_labels(ratings), session_labels(np.where(none, 0, ratings))], axis=1)
        both = np.stack([sessions, synthetic], axis=1)
        return RewardBatch(torch.from_numpy(history), torch.from_numpy(both), torch.from_numpy(labels))

    def pairs(self, part: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """history int64[G, n] and sessions int64[G, 2, m], the second with more items replaced.

        part: "choice" or "gate", of which half of the held-out users.
        """
        rng = stable_rng(f"reward-{part}", self.seed)
        rows = rng.choice(np.flatnonzero(self.gate if part == "gate" else self.held & ~self.gate), count)
        sessions, _, history = self.logged(rows)
        m = sessions.shape[1]
        fewer = rng.integers(0, m, count)
        more = fewer + 1 + (rng.random(count) * (m - fewer)).astype(np.int64)
        pair = [self.replace(rows, sessions, number, rng)[0] for number in (fewer, more)]
        return history, np.stack(pair, axis=1)

    def logged(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Items int64[B, m], ratings float[B, m] and histories int64[B, n] of train sessions."""
        table, at = self.data.interactions, self.start[rows][:, None] + np.arange(self.data.size)
        history = histories(self.data, self.start[rows], self.owner[rows], self.history)
        return table.item[at].astype(np.int64), table.rating[at], history

    def replace(self, rows: np.ndarray, sessions: np.ndarray, count: np.ndarray, rng: np.random.Generator):
        """Sessions with `count` items each replaced, and bool[B, m] which; replacements never repeat an item."""
        made, batch, m = sessions.copy(), len(rows), sessions.shape[1]
        chosen = rng.random((batch, m)).argsort(1) < count[:, None]
        user, pool = self.data.users[self.owner[rows]], self.pool[self.owner[rows]]
        for column in range(m):
            open_rows = np.flatnonzero(chosen[:, column])
            generated = rng.random(batch) < 0.5
            while len(open_rows):
                drawn = self._draw(pool[open_rows], generated[open_rows], rng)
                taken = self.rated[user[open_rows], drawn] | (made[open_rows] == drawn[:, None]).any(1)
                made[open_rows[~taken], column] = drawn[~taken]
                open_rows = open_rows[taken]
                generated[:] = False  # a pool may hold nothing that is new
        return made, chosen

    def _draw(self, pool: np.ndarray, generated: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        popular = np.searchsorted(self.popular, rng.random(len(pool)), side="right").clip(max=len(self.popular) - 1) + 1
        if not pool.shape[1]:
            return popular
        made = pool[np.arange(len(pool)), rng.integers(0, pool.shape[1], len(pool))]
        return np.where(generated & (made > 0), made, popular)


def pairwise_accuracy(model: RewardModel, rows: RewardRows, part: str, count: int, device: torch.device) -> float:
    """Share of held-out pairs of a part whose session with fewer replaced items has the larger R; ties count half."""
    history, sessions = rows.pairs(part, count)
    total = rewards(model, history, sessions, device).mean(2)
    return float(((total[:, 0] > total[:, 1]) + 0.5 * (total[:, 0] == total[:, 1])).mean())
