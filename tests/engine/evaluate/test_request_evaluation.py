"""Evaluation on the request table."""

import numpy as np
import pytest
import torch
from torch import nn

from auto_research.data.requests import RequestTable
from auto_research.evaluate.ctr import (
    joint_score,
    measure_requests,
    model_scorer,
    rank_catalogue,
    rated_batches,
    score_rated,
    sigmoid,
    split_pairs,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def table(movielens_100k) -> RequestTable:
    return RequestTable.load(movielens_100k / "requests").restrict(30)


class ByItem(nn.Module):
    """engage and like fall with the item id; the request's part is computed by `prepare`."""

    def __init__(self):
        super().__init__()
        self.prepared = 0
        self.sizes = []

    def prepare(self, batch):
        self.prepared += 1
        return batch.user_stats.sum(1)

    def score(self, state, batch):
        self.sizes.append(batch.pairs())
        falling = -batch.item.float() / 100 + 0 * state[batch.request_of]
        return torch.stack([falling, falling, falling], 1)

    def forward(self, batch):
        return self.score(self.prepare(batch), batch)


def test_joint_score_by_hand():
    found = joint_score(np.array([[0.0, 0.0, 9.0], [800.0, -800.0, 0.0]]))
    assert found.tolist() == pytest.approx([2 * np.log(0.5), -800.0])


def test_sigmoid_does_not_overflow():
    assert sigmoid(np.array([-1e4, 0.0, 1e4])).tolist() == [0.0, 0.5, 1.0]


def test_rank_is_counted_among_items_not_rated_earlier(table):
    tasks = table.catalogue_tasks("test", 5)
    ranked = rank_catalogue(model_scorer(ByItem(), CPU), table, tasks, history=4, device=CPU)
    for index in range(len(tasks)):
        free = [i for i in range(1, 1683) if i not in set(tasks.excluded[index].tolist())]
        assert ranked.rank[index] == 1 + free.index(tasks.target[index])
        assert ranked.top[index].tolist() == free[:10]
    assert ranked.pairs == 5 * 1682


def test_equal_scores_rank_against_the_target(table):
    tasks = table.catalogue_tasks("test", 2)
    ranked = rank_catalogue(lambda batch: np.zeros((batch.pairs(), 3)), table, tasks, history=4, device=CPU)
    assert ranked.rank.tolist() == [1682 - len(tasks.excluded[i]) for i in range(2)]


def test_chunks_share_the_request_and_change_nothing(table):
    tasks, model = table.catalogue_tasks("test", 2), ByItem()
    small = rank_catalogue(model_scorer(model, CPU), table, tasks, history=4, device=CPU, chunk=500)
    assert model.prepared == 2
    assert model.sizes == [500, 500, 500, 182] * 2
    whole = rank_catalogue(model_scorer(ByItem(), CPU), table, tasks, history=4, device=CPU, chunk=1682)
    assert np.array_equal(small.rank, whole.rank)
    assert np.array_equal(small.top, whole.top)


def test_parts_cover_the_pairs_in_order(table):
    batch = table.score_batch(int(table.requests("test")[0]), np.arange(1, 8), history=4)
    parts = split_pairs(batch, 3)
    assert [part.pairs() for part in parts] == [3, 3, 1]
    assert torch.cat([part.item for part in parts]).tolist() == list(range(1, 8))
    assert parts[1].hist_item is batch.hist_item


def test_rated_rows_are_scored_in_eval_mode_without_gradient(table):
    class Checked(nn.Module):
        def forward(self, batch):
            assert not self.training
            assert not torch.is_grad_enabled()
            assert batch.rated.all()
            return torch.stack([batch.item.float() * 0, batch.like * 2 - 1, batch.like], 1)

    rows = score_rated(model_scorer(Checked().train(), CPU), rated_batches(table, "test", history=4, at_once=7))
    assert len(rows.user) == table.rows("test")
    assert set(np.round(rows.score[rows.label == 1], 6)) == {round(1 / (1 + np.exp(-1.0)), 6)}


def test_a_perfect_like_head_has_auc_one(table):
    measured = measure_requests(
        lambda batch: np.column_stack([batch.engage, batch.like * 8 - 4, batch.love]),
        table,
        device=CPU,
        history=4,
        catalogue_users=3,
    )
    assert measured.metrics["auc"] == measured.metrics["uauc"] == 1.0
    assert measured.rows.label == [int(score > 0.5) for score in measured.rows.score]
