"""Whole arms of the two reference adapters, tiny tier: the shadow run's loss curve is the CPU run's."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from auto_research.blocks.dropout import Dropout
from auto_research.experiment.inline import run_adapter

ARMS = {
    "din": ["logistic_regression", "base_mean_pool", "din_full", "din_softmax"],
    "rankmixer": ["dcnv2_matched", "rankmixer_dense", "attention_tokens", "rankmixer_smoe_dtsi"],
}


@pytest.fixture
def one_dropout(monkeypatch):
    """`blocks.dropout` draws bytes on CPU and floats elsewhere; the comparison needs the same draws on both sides."""
    monkeypatch.setattr(Dropout, "forward", lambda self, x: F.dropout(x, self.rate, self.training))


@pytest.mark.usefixtures("one_dropout")
@pytest.mark.parametrize("key", ARMS)
def test_loss_curves_of_every_arm_equal_cpu(key, tmp_path, movielens_100k):
    data = tmp_path / "data"
    data.mkdir()
    (data / "movielens-100k").symlink_to(movielens_100k)
    runs = {
        device: run_adapter(
            key, "tiny", workdir=tmp_path / device, device=device, data_root=data, arms=ARMS[key], threads=1
        )
        for device in ("cpu", "shadow")
    }
    for arm in ARMS[key]:
        want, have = runs["cpu"][arm], runs["shadow"][arm]
        assert len(want.curve) == len(have.curve) > 0
        for before, after in zip(want.curve, have.curve, strict=True):
            assert after["loss"] == pytest.approx(before["loss"], rel=1e-4), arm
            assert after["auc"] == pytest.approx(before["auc"], abs=1e-3), arm
        for name, value in want.metrics.items():
            assert have.metrics[name] == pytest.approx(value, abs=1e-2), (arm, name)
        assert have.rows.score == pytest.approx(want.rows.score, abs=1e-4)
