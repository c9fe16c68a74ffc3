"""Sampled softmax: hand cases of the cards argus and sessionrec, the full-softmax limit, empty rows."""

import math

import pytest
import torch
import torch.nn.functional as F

from auto_research.blocks.sampled_softmax import Temperature, log_proposal, multi_positive_softmax, sampled_softmax


def test_log_q_by_hand():
    """Scores 0 and 0, Q = 0.5 and 0.25: corrected logits 0.6931 and 1.3863, loss log 3."""
    loss = sampled_softmax(
        torch.zeros(1),
        torch.zeros(1, 1),
        log_q_positive=torch.tensor([0.5]).log(),
        log_q_negative=torch.tensor([0.25]).log(),
    )
    assert loss.tolist() == [pytest.approx(math.log(3), rel=1e-6)]


def test_every_item_once_is_the_full_softmax():
    torch.manual_seed(0)
    scores, target, n = torch.randn(5, 9), torch.tensor([0, 3, 8, 3, 1]), 9
    log_q = torch.full((n,), 1 / n).log()
    usable = torch.ones(5, n, dtype=torch.bool).scatter(1, target.unsqueeze(1), False)
    positive = scores.gather(1, target.unsqueeze(1)).squeeze(1)
    loss = sampled_softmax(
        positive, scores, log_q_positive=log_q[target], log_q_negative=log_q.expand(5, n), usable=usable
    )
    torch.testing.assert_close(loss, F.cross_entropy(scores, target, reduction="none"))


def test_excluded_negatives_have_no_gradient_and_an_empty_row_costs_nothing():
    negative = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    usable = torch.tensor([[True, False], [False, False]])
    loss = sampled_softmax(torch.zeros(2), negative, usable=usable)
    assert loss[1].item() == 0.0
    loss.sum().backward()
    assert (negative.grad != 0).tolist() == [[True, False], [False, False]]
    assert negative.grad.isfinite().all()


def test_proposal_by_hand():
    """Two in-batch and two uniform draws over counts 3 and 1: Q = (2 * 3/4 + 2/2) / 4 and (2 * 1/4 + 2/2) / 4."""
    torch.testing.assert_close(log_proposal(torch.tensor([3, 1]), 2, 2).exp(), torch.tensor([0.625, 0.375]))
    assert log_proposal(torch.arange(5), 256, 256).exp().sum().item() == pytest.approx(1)


def test_other_positives_are_no_negatives():
    """Card sessionrec: two positives of score 1, one negative of score 0 cost 0.3133, not 0.8620."""
    ones = torch.ones(1, 2, dtype=torch.bool)
    loss = multi_positive_softmax(torch.ones(1, 2), ones, torch.zeros(1, 1), ones[:, :1])
    assert loss.tolist() == [pytest.approx(0.3133, abs=1e-4)]


def test_multi_positive_rows_equal_single_rows_averaged():
    torch.manual_seed(0)
    positive, negative = torch.randn(4, 3), torch.randn(4, 6)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]]).bool()
    usable = torch.rand(4, 6) < 0.6
    log_p, log_n = torch.randn(4, 3), torch.randn(6)
    options = {"log_q_positive": log_p, "log_q_negative": log_n}
    found = multi_positive_softmax(positive, mask, negative, usable, **options)
    for row in range(4):
        single = [
            sampled_softmax(
                positive[row, k, None],
                negative[row, None],
                log_q_positive=log_p[row, k, None],
                log_q_negative=log_n,
                usable=usable[row, None],
            )
            for k in range(3)
            if mask[row, k]
        ]
        expected = torch.stack(single).mean() if single else torch.zeros(())
        torch.testing.assert_close(found[row], expected)


def test_rows_without_positives_or_negatives_have_finite_gradients():
    positive, negative = torch.zeros(2, 2, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[False, False], [True, True]])
    usable = torch.tensor([[True] * 3, [False] * 3])
    loss = multi_positive_softmax(positive, mask, negative, usable)
    assert loss.tolist() == [0.0, 0.0]
    loss.sum().backward()
    assert (positive.grad == 0).all()
    assert (negative.grad == 0).all()


def test_temperature_is_clamped():
    layer = Temperature(0.05)
    assert layer(torch.tensor([1.0])).item() == pytest.approx(20)
    with torch.no_grad():
        layer.tau.fill_(-3.0)
    assert layer(torch.tensor([1.0])).item() == pytest.approx(100)
