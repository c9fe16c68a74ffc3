"""Batches of users: flat tokens and events, next-session targets, and the negatives drawn for them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from adapters.sessionrec.sessions import TokenSequences, ranges
from auto_research.runtime.seeds import stable_rng


@dataclass
class SessionBatch:
    """B users with N tokens, E events and R targets; all int64 but `drawn`, `user` contiguous, tokens oldest first.

    item, sign (1 positive, 2 negative), token_of: [E].  user, gap: [N].  users: B.
    state: [R] token that predicts.  pos, neg: [R, K] positives and negatives of its target session, 0 padded.
    aim: [R, K'] positives the losses ask for (pos itself, or one of them).  wrong: [R, K] items the rank loss puts below
    aim (neg itself, or random ones).  skip, skip_of: [S] all items of the target sessions and the row of each, never
    retrieval negatives of that row.  drawn: float32[n_items + 1], how often each item was drawn uniformly.
    """

    item: Tensor
    sign: Tensor
    token_of: Tensor
    user: Tensor
    gap: Tensor
    state: Tensor
    pos: Tensor
    neg: Tensor
    aim: Tensor
    wrong: Tensor
    skip: Tensor
    skip_of: Tensor
    drawn: Tensor
    users: int

    def to(self, device: torch.device | str) -> SessionBatch:
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "users"}
        return SessionBatch(**moved, users=self.users)

    @property
    def tokens(self) -> int:
        return len(self.gap)

    def last(self) -> Tensor:
        """int64[B] newest token of every user."""
        return torch.bincount(self.user, minlength=self.users).cumsum(0) - 1


def take(sequences: TokenSequences, users: np.ndarray, n_items: int) -> SessionBatch:
    """The tokens and targets of the users at int[B] `users` of the sequences, nothing drawn yet."""
    event, event_owner = ranges(sequences.event_start[users], sequences.event_start[users + 1])
    token, token_owner = ranges(sequences.token_start[users], sequences.token_start[users + 1])
    target, target_owner = ranges(sequences.target_start[users], sequences.target_start[users + 1])
    skip, skip_owner = ranges(sequences.skip_start[target], sequences.skip_start[target + 1])
    size = np.diff(sequences.token_start)[users]
    shift = sequences.token_start[users] - (np.cumsum(size) - size)  # old token number - new one
    arrays = {
        "item": sequences.item[event],
        "sign": np.where(sequences.positive[event], 1, 2),
        "token_of": sequences.token_of[event] - shift[event_owner],
        "user": token_owner,
        "gap": sequences.gap[token],
        "state": sequences.state[target] - shift[target_owner],
        "pos": sequences.pos[target],
        "neg": sequences.neg[target],
        "aim": sequences.pos[target],
        "wrong": sequences.neg[target],
        "skip": sequences.skip[skip],
        "skip_of": skip_owner,
        "drawn": np.zeros(n_items + 1, dtype=np.float32),
    }
    return SessionBatch(**{name: torch.from_numpy(values) for name, values in arrays.items()}, users=len(users))


@dataclass(frozen=True)
class Draws:
    """What is random in a batch. single: the losses ask for one positive of each target; its negatives stay the same.

    uniform: items drawn from the catalogue per step.  wrong: the rank loss takes 'observed' negatives or 'random' items.
    """

    uniform: int = 256
    single: bool = False
    wrong: str = "observed"

    def apply(self, batch: SessionBatch, rng: np.random.Generator) -> SessionBatch:
        """The batch with its draws. rng: a function of seed, epoch and index, so that a run can go on anywhere."""
        n_items = len(batch.drawn) - 1
        drawn = np.bincount(rng.integers(1, n_items + 1, self.uniform), minlength=n_items + 1).astype(np.float32)
        pos, aim, wrong = batch.pos.numpy(), batch.aim.numpy(), batch.wrong.numpy()
        if self.single and len(pos):
            chosen = (rng.random(len(pos)) * (pos > 0).sum(1)).astype(np.int64)
            aim = pos[np.arange(len(pos)), chosen][:, None]
        if self.wrong == "random":
            random = rng.integers(1, n_items + 1, wrong.shape)
            taken = (random[:, :, None] == pos[:, None, :]).any(2)
            wrong = np.where((wrong > 0) & ~taken, random, 0)
        made = {"aim": aim, "wrong": wrong, "drawn": drawn}
        return replace(batch, **{name: torch.from_numpy(values) for name, values in made.items()})


class EpochBatches:
    """Batches of one epoch: all users once, in an order seeded by (seed, epoch), draws seeded by (seed, epoch, index).

    Users come together by chance: batches of like lengths would save padding, but the in-batch negatives of a user would
    no longer follow the shares that logQ assumes.
    """

    def __init__(
        self,
        sequences: TokenSequences,
        n_items: int,
        size: int,
        draws: Draws,
        seed: int,
        epoch: int,
        device: torch.device,
    ):
        self.sequences, self.n_items, self.draws, self.device = sequences, n_items, draws, device
        self.seed, self.epoch = seed, epoch
        rng = stable_rng("session-order", seed, epoch)
        order = rng.permutation(len(sequences))
        self.groups = np.split(order, range(size, len(order), size))

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> SessionBatch:
        rng = stable_rng("session-draws", self.seed, self.epoch, index)
        batch = take(self.sequences, self.groups[index], self.n_items)
        return self.draws.apply(batch, rng).to(self.device)
