"""AUC inside users, pooled AUC, log loss."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from auto_research.metrics.ctr import ctr_metrics, row_logloss, user_auc
from auto_research.runtime.errors import NonFinite, RunFailure

# user 1: four rows, AUC 1; user 2: two rows, AUC 0.5 (a tie); user 3: one class only
USER = np.array([1, 2, 3, 1, 1, 2, 3, 1])
LABEL = np.array([1, 1, 1, 0, 1, 0, 1, 0])
SCORE = np.array([0.9, 0.4, 0.1, 0.2, 0.8, 0.4, 0.2, 0.3])


def test_gauc_hand_case_of_the_din_card():
    metrics, per_user = ctr_metrics(USER, LABEL, SCORE)
    assert metrics["gauc"] == pytest.approx((4 * 1 + 2 * 0.5) / 6)
    assert round(metrics["gauc"], 4) == 0.8333
    assert metrics["uauc"] == pytest.approx(0.75)
    assert per_user["user"].tolist() == [1, 2]
    assert per_user["uauc"].tolist() == [1.0, 0.5]
    assert per_user["rows"].tolist() == [4, 2]


def test_pooled_auc_and_logloss_are_scikit_learns():
    metrics, _ = ctr_metrics(USER, LABEL, SCORE)
    assert metrics["auc"] == roc_auc_score(LABEL, SCORE)
    assert metrics["logloss"] == pytest.approx(log_loss(LABEL, SCORE))


rows = st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 4)), min_size=4, max_size=60)


@settings(max_examples=150, deadline=None)
@given(rows)
def test_user_auc_equals_scikit_learn_for_every_user(values):
    user, label, score = (np.array(column) for column in zip(*values, strict=True))
    got = user_auc(user, label, score)
    both = [u for u in np.unique(user) if 0 < label[user == u].mean() < 1]
    assert got.user.tolist() == both
    assert got.auc.tolist() == pytest.approx([roc_auc_score(label[user == u], score[user == u]) for u in both])
    assert got.rows.tolist() == [(user == u).sum() for u in both]


def test_certain_and_wrong_probability_has_a_finite_loss():
    assert row_logloss([1, 0], [0.0, 0.25]).tolist() == pytest.approx([-np.log(1e-7), -np.log(0.75)])
    assert ctr_metrics([1, 1], [1, 0], [0.0, 1.0])[0]["logloss"] == pytest.approx(-np.log(1e-7))


def test_row_losses_average_to_logloss():
    assert row_logloss(LABEL, SCORE).mean() == pytest.approx(ctr_metrics(USER, LABEL, SCORE)[0]["logloss"])


def test_non_finite_scores_stop():
    with pytest.raises(NonFinite):
        ctr_metrics([1, 1], [0, 1], [0.5, np.nan])


def test_one_label_only_is_a_clear_failure():
    with pytest.raises(RunFailure, match="both labels"):
        ctr_metrics([1, 1], [1, 1], [0.5, 0.4])
    with pytest.raises(RunFailure, match="both labels"):
        ctr_metrics([1, 2], [1, 0], [0.5, 0.4])
