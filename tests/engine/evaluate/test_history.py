"""Costs over the length of history."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auto_research.data.requests import RequestTable
from auto_research.evaluate.history import candidate_cost, step_milliseconds


@pytest.fixture(scope="module")
def table(movielens_100k) -> RequestTable:
    return RequestTable.load(movielens_100k / "requests").restrict(24)


class Counter(nn.Module):
    """One product [P, L] x [L, 3] and one kept activation [P, L]."""

    def __init__(self, history: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(history, 3))

    def forward(self, batch):
        x = batch.hist_rating.float()[batch.request_of]
        return x @ self.weight


@pytest.mark.parametrize("history", [5, 20])
def test_cost_per_candidate_by_hand(table, history):
    cost = candidate_cost(Counter(history), table, device=torch.device("cpu"), history=history, candidates=8)
    assert cost.flops == 2 * history * 3
    assert cost.saved_bytes == 4 * history  # the input of the product; its weight needs no gradient of the input


def test_a_step_is_timed_and_leaves_no_gradient(table):
    model = Counter(5)
    assert step_milliseconds(model, table, device=torch.device("cpu"), history=5, requests=4) > 0
    assert model.weight.grad is None
    assert not model.training
