"""The host's rule for reducer and encoder slots: what is kept per request must not depend on the candidates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from auto_research.data.behaviours import BehaviourBatch


@torch.no_grad()
def check_candidate_free(model: nn.Module, batch: BehaviourBatch) -> None:
    """Raise ValueError when anything `model.prepare` keeps depends on the batch's candidates, or is kept per pair.

    The rule of the reducer and encoder slots: whatever fills them, the serving cache of one request serves every
    candidate, and has the batch size of the requests.
    """
    model.eval()
    other = replace(
        batch,
        item=batch.item.flip(0).roll(1),
        decade=batch.decade.flip(0),
        popularity=batch.popularity + 1,
        cross=batch.cross - 1,
    )
    requests = len(batch.hour)
    for one, two in zip(tensors(model.prepare(batch)), tensors(model.prepare(other)), strict=True):
        if len(one) != requests:
            raise ValueError(f"the request's part holds a tensor of shape {tuple(one.shape)} for {requests} requests")
        if not torch.equal(one, two):
            raise ValueError("the request's part depends on the candidates: a reducer or encoder must not see them")


def tensors(state: Any) -> list[Tensor]:
    """All tensors of a nested state."""
    if isinstance(state, Tensor):
        return [state]
    return [t for part in state for t in tensors(part)]
