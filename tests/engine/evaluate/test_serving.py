"""Cost of a request at several numbers of candidates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from auto_research.data.requests import RequestTable
from auto_research.evaluate.serving import ALONE, SHARED, candidates_of, serving_studies
from auto_research.experiment.studies import joined_studies, study
from auto_research.metrics.cost import saved_bytes
from auto_research.results import curves, markdown

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def table(movielens_100k) -> RequestTable:
    return RequestTable.load(movielens_100k / "requests").restrict(24)


class Split(nn.Module):
    """A request part of 2 * 24 * 8 FLOPs on [R, 22 + 2] and a pair part of 2 * 10 * 3 on [P, 10]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.request = nn.Linear(width, 8, bias=False)
        self.pair = nn.Linear(10, 3, bias=False)

    def prepare(self, batch):
        return self.request(batch.user_stats)

    def score(self, state, batch):
        return self.pair(torch.cat([state[batch.request_of], batch.popularity], dim=1))

    def forward(self, batch):
        return self.score(self.prepare(batch), batch)


def test_flops_are_a_plus_b_times_candidates_when_the_request_is_shared(table):
    width = table.batch(table.requests("test")[:1], history=1).user_stats.shape[1]
    found = serving_studies(Split(width), table, device=CPU, history=4, candidates=(1, 5, 40), warm_up=0, timed=1)
    lines = found["flops_per_request"]["lines"]
    once, each = 2 * width * 8, 2 * 10 * 3
    assert lines[SHARED] == [[count, once + count * each] for count in (1, 5, 40)]
    assert lines[ALONE] == [[count, count * (once + each)] for count in (1, 5, 40)]
    assert all(value > 0 for line in found["request_ms"]["lines"].values() for _, value in line)


def test_candidates_repeat_the_catalogue_when_it_is_smaller(table):
    items = table.interactions.n_items
    batch = candidates_of(table, items + 2, history=3, device=CPU)
    assert batch.pairs() == items + 2
    assert batch.item[-2:].tolist() == [1, 2]
    assert np.unique(batch.request_of.numpy()).tolist() == [0]


def test_saved_bytes_count_every_storage_once():
    x = torch.randn(64, 8, requires_grad=True)

    def work():
        y = x * x  # keeps x twice
        return y.exp().sum()  # keeps the result of exp

    assert saved_bytes(work) == 2 * 64 * 8 * 4


def test_studies_of_all_arms_share_a_panel_and_a_table():
    one = study("candidates", "FLOPs", {"cached": [(1, 10), (100, 50)]})
    two = study("candidates", "FLOPs", {"": [(1, 20)]})
    result = {"arms": {"a": {"extra": {"studies": {"cost": one}}}, "b": {"extra": {"studies": {"cost": two}}}}}
    joined = joined_studies(result)
    assert joined["cost"]["lines"] == {"a, cached": [[1, 10], [100, 50]], "b": [[1, 20]]}
    height, drawn = curves._study("cost", joined["cost"])
    assert drawn.count("<polyline") == 2
    assert "a, cached" in drawn
    assert height > 200
    text = "\n".join(markdown._studies(result))
    assert "| a, cached | 10 | 50 |" in text
    assert "| b | 20 | - |" in text


def test_a_logarithmic_study_refuses_zero():
    with pytest.raises(ValueError, match="above 0"):
        study("events", "bytes", {"": [(0, 1)]})
