"""Preference objectives against values worked by hand, their gradients and their limits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from auto_research.blocks.preference import (
    dpo,
    dpo_margin,
    ecpo,
    frozen_reference,
    gbpo,
    group_adv,
    grpo,
    k3,
    logprob_of_logits,
    token_logprobs,
    weights_hash,
)

probabilities = st.floats(1e-4, 1 - 1e-4)


def logs(*values):
    return torch.tensor([math.log(v) for v in values], requires_grad=True)


def test_logprob_of_logits_of_known_probabilities():
    shares = torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]])
    tokens = torch.tensor([[1, 2]])
    assert token_logprobs(shares.log() + 3, tokens).exp()[0].tolist() == pytest.approx([0.25, 0.8])
    assert logprob_of_logits(shares.log(), tokens).item() == pytest.approx(math.log(0.2))
    assert logprob_of_logits(shares.log(), tokens, torch.tensor([[True, False]])).item() == pytest.approx(
        math.log(0.25)
    )


def test_logprob_of_logits_is_float32_under_low_precision():
    logits = torch.zeros(1, 20, 64, dtype=torch.bfloat16)
    tokens = torch.zeros(1, 20, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        value = logprob_of_logits(logits, tokens)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(-20 * math.log(64), rel=1e-6)


def test_dpo_of_equal_models_is_log_two():
    logp = torch.tensor([-2.0, -3.0])
    assert dpo(logp, logp - 1, logp, logp - 1, 0.1).tolist() == pytest.approx([math.log(2)] * 2)


def test_dpo_worked_example():
    # margin = .1 [(-2 + 2.5) - (-3 + 2.5)] = .1, loss = log(1 + e^-.1)
    args = [torch.tensor([v], requires_grad=True) for v in (-2.0, -3.0, -2.5, -2.5)]
    loss = dpo(*args, 0.1)
    assert loss.item() == pytest.approx(0.6444, abs=5e-5)
    assert dpo_margin(*args, 0.1).item() == pytest.approx(0.1)
    loss.sum().backward()
    winner, loser, reference_winner, reference_loser = (arg.grad for arg in args)
    assert winner.item() == pytest.approx(-0.1 / (1 + math.exp(0.1)))
    assert loser.item() == -winner.item()
    assert reference_winner is None
    assert reference_loser is None


@pytest.mark.parametrize(
    ("advantage", "pi", "pi_old", "loss"),
    [(1, 0.2, 0.1, -1.0), (1, 0.1, 0.2, -0.5), (-1, 0.3, 0.1, 0.42857), (-1, 0.05, 0.98, 0.05102)],
)
def test_gbpo_worked_examples(advantage, pi, pi_old, loss):
    logp = logs(pi)
    value = gbpo(logp, logs(pi_old), torch.tensor([advantage]))
    assert value.item() == pytest.approx(loss, abs=1e-5)
    value.sum().backward()
    # the denominator carries no gradient: d loss / d log pi is the loss itself
    assert logp.grad.item() == pytest.approx(loss, abs=1e-5)


@given(probabilities, probabilities, st.sampled_from([-1.0, 1.0]))
def test_gbpo_gradient_is_bounded_by_cross_entropy(pi, pi_old, advantage):
    logp = torch.tensor([math.log(pi)], dtype=torch.float64, requires_grad=True)
    gbpo(logp, logs(pi_old), torch.tensor([advantage])).sum().backward()
    slope = abs(logp.grad.item()) / pi
    assert slope <= 1.001 * (1 / pi if advantage > 0 else 1 / (1 - pi))
    assert slope > 0


def test_gbpo_ignores_rows_without_advantage_and_survives_extremes():
    logp = torch.tensor([-1.0, -500.0, -500.0, 0.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -505.0, -505.0, -300.0, float("-inf")])
    value = gbpo(logp, old, torch.tensor([0.0, 1.0, -1.0, -1.0, 1.0]))
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(logp.grad).all()
    assert value[0] == 0
    assert logp.grad[0] == 0
    assert logp.grad[1].item() == pytest.approx(-1)  # a product of probabilities would have underflown to 0


def test_gbpo_per_token():
    logp = logs(0.2, 0.1).reshape(1, 2)
    value = gbpo(logp, logs(0.1, 0.2).reshape(1, 2), torch.tensor([[1.0]]))
    assert value.tolist() == [pytest.approx([-1.0, -0.5])]


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (1.0, 1.1, -1.1, -1.1),
        (1.0, 1.5, -1.2, 0.0),  # clipped
        (1.0, 0.5, -0.5, -0.5),
        (-1.0, 0.5, 0.8, 0.0),  # clipped
        (-1.0, 4.0, 4.0, 4.0),
        (0.5, 1.1, -0.55, -0.55),
    ],
)
def test_grpo_clips_where_the_policy_already_went(advantage, ratio, loss, slope):
    logp = logs(0.1 * ratio)
    value = grpo(logp, logs(0.1), torch.tensor([advantage]), clip=0.2)
    assert value.item() == pytest.approx(loss, abs=1e-6)
    value.sum().backward()
    assert logp.grad.item() == pytest.approx(slope, abs=1e-6)


def test_grpo_adds_k3_to_a_reference():
    logp, reference = logs(0.2), logs(0.1)
    # d = log .5: e^d - d - 1 = .5 + .6931 - 1
    assert k3(logp, reference).item() == pytest.approx(math.log(2) - 0.5)
    plain = grpo(logp, logs(0.2), torch.tensor([1.0]))
    assert (grpo(logp, logs(0.2), torch.tensor([1.0]), 0.2, 0.04, reference) - plain).item() == pytest.approx(
        0.04 * (math.log(2) - 0.5)
    )
    with pytest.raises(ValueError, match="reference"):
        grpo(logp, logs(0.2), torch.tensor([1.0]), 0.2, 0.04)


def test_grpo_with_a_vanished_old_probability_is_finite():
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    value = grpo(logp, torch.tensor([-300.0, -300.0]), torch.tensor([1.0, 0.0]))
    value.sum().backward()
    assert value.tolist() == pytest.approx([-1.2, 0])
    assert torch.isfinite(logp.grad).all()


@pytest.mark.parametrize(
    ("advantage", "pi", "pi_old", "loss"),
    [
        (-1.0, 0.4, 0.1, 1.3),  # pi_old' = .4 / 1.3
        (-1.0, 0.11, 0.1, 1.1),  # .11 / 1.3 < pi_old: as without early clipping
        (-1.0, 0.05, 0.1, 0.8),
        (1.0, 0.4, 0.1, -1.2),
        (1.0, 0.05, 0.1, -0.5),
    ],
)
def test_ecpo_worked_examples(advantage, pi, pi_old, loss):
    logp = logs(pi)
    value = ecpo(logp, logs(pi_old), torch.tensor([advantage]))
    assert value.item() == pytest.approx(loss, abs=1e-6)
    value.sum().backward()
    assert abs(logp.grad.item()) <= 1.3 + 1e-6


def test_group_advantage_worked_example():
    # mean 2, population std sqrt(2/3)
    adv = group_adv(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 6.0]]))
    assert adv[0].tolist() == pytest.approx([-1.22474, 0, 1.22474], abs=1e-4)
    assert adv[1].tolist() == pytest.approx([-0.70711, -0.70711, 1.41421], abs=1e-4)


@given(st.floats(-1e5, 1e5, width=32), st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(reward, size):
    adv = group_adv(torch.full((2, size), reward))
    assert (adv == 0).all()


def test_equal_rewards_give_a_zero_loss_without_nan():
    logp = torch.tensor([-3.0, -5.0, -2.0], requires_grad=True)
    adv = group_adv(torch.full((3,), 0.1))
    for loss in (gbpo, ecpo, grpo):
        logp.grad = None
        value = loss(logp, torch.tensor([-3.5, -4.0, -2.0]), adv)
        value.sum().backward()
        assert value.tolist() == [0, 0, 0]
        assert logp.grad.tolist() == [0, 0, 0]


def test_a_reference_is_frozen_and_its_hash_shows_movement():
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    reference = frozen_reference(model)
    before = weights_hash(reference)
    assert weights_hash(model) == before
    assert not reference.training
    assert model.training
    assert not any(p.requires_grad for p in reference.parameters())
    with torch.no_grad():
        model[0].bias[0] += 1e-6
    assert weights_hash(model) != before
    assert weights_hash(reference) == before
