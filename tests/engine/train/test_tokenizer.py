"""Training an RQ-VAE: export from trained books, resets, and a killed run that ends with the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from auto_research.blocks.residual_kmeans import nearest_codes
from auto_research.blocks.rqvae import RQVAE, RQVAEConfig
from auto_research.runtime.errors import ConfigError
from auto_research.train.state import StateFolder
from auto_research.train.tokenizer import TokenizerPlan, fit_rqvae


def vectors(items=60, width=6, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((7, width))[rng.integers(7, size=items)] + 0.3 * rng.standard_normal((items, width))
    return x.astype(np.float32)


def config(**changes) -> RQVAEConfig:
    return RQVAEConfig(**({"inputs": (6,), "sizes": (6, 4), "hidden": ((8,),), "width": 4} | changes))


def fitted(state, x=None, cfg=None, pairs=None, *, every=20.0, **plan):
    return fit_rqvae(
        vectors() if x is None else x,
        cfg or config(),
        plan=TokenizerPlan(**({"steps": 60, "batch": 16, "reset_every": 20} | plan)),
        seed=1,
        state=StateFolder(state, every),
        device="cpu",
        pairs=pairs,
    )


def test_codes_are_those_of_the_trained_model(tmp_path):
    result = fitted(tmp_path / "a")
    x = torch.from_numpy(vectors())
    assert (result.model.codes([x])[0].numpy() == result.codes[0]).all()
    z = result.model.latent([x]).detach().numpy()
    assert (nearest_codes(z, result.books[0]) == result.codes[0]).all()
    result.model.save(tmp_path)
    assert (RQVAE.load(tmp_path).codes([x])[0].numpy() == result.codes[0]).all()
    assert result.history[-1]["step"] == 60


def test_training_lowers_the_reconstruction_error(tmp_path):
    short, long = fitted(tmp_path / "a", steps=1), fitted(tmp_path / "b", steps=400, learning_rate=1e-2)
    assert long.statistics["reconstruction"][0] < 0.5 * short.statistics["reconstruction"][0]
    x = vectors()
    zhat = sum(book[long.codes[0][:, level]] for level, book in enumerate(long.books[0]))
    error = ((x - long.model.decode(torch.from_numpy(zhat))[0].detach().numpy()) ** 2).sum(1).mean()
    assert long.statistics["reconstruction"][0] == pytest.approx(error, rel=1e-4)
    assert all(0.8 <= share <= 1 for share in long.statistics["channels"][0]["utilisation"])


def test_dead_entries_are_revived_in_time_and_left_alone_at_the_end(tmp_path, monkeypatch):
    calls = []
    usual = RQVAE.reset_unused

    def counted(self, inputs, *parts):
        moved = usual(self, inputs, *parts)
        calls.append((parts[-1], moved))
        return moved

    monkeypatch.setattr(RQVAE, "reset_unused", counted)
    fitted(tmp_path / "a", steps=100, warm_up=5)
    assert [step for step, _ in calls] == [20, 40, 60, 80]  # of 105, none in the last 20


def test_warm_up_steps_are_not_quantised(tmp_path, monkeypatch):
    seen = []
    usual = RQVAE.losses

    def watched(self, *args, **kwargs):
        seen.append(bool(self.quantising))
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(RQVAE, "losses", watched)
    fitted(tmp_path / "a", steps=4, warm_up=3)
    assert seen == [False] * 3 + [True] * 4
    seen.clear()
    fitted(tmp_path / "b", steps=2)
    assert seen == [True] * 2


@pytest.mark.parametrize(
    ("changes", "plan", "every", "with_pairs"),
    [
        ({}, {}, 20.0, False),
        ({"channels": 2, "rotation": "householder", "progressive": True}, {"warm_up": 25}, 20.0, False),
        (
            {"pair_weight": 1.0},
            {"warm_up": 10, "pair_batch": 8},
            0.0,
            True,
        ),  # saved after every step, the reset at 40 too
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path, monkeypatch, changes, plan, every, with_pairs):
    pairs = np.random.default_rng(0).integers(0, 60, (30, 2)) if with_pairs else None
    whole = fitted(tmp_path / "whole", cfg=config(**changes), pairs=pairs, **plan)

    class Killed(Exception):
        pass

    usual, seen = RQVAE.losses, []

    def dying(self, *args, **kwargs):
        seen.append(1)
        if len(seen) == 41:
            raise Killed
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(RQVAE, "losses", dying)
    with pytest.raises(Killed):
        fitted(tmp_path / "killed", cfg=config(**changes), pairs=pairs, every=every, **plan)
    resumed = fitted(tmp_path / "killed", cfg=config(**changes), pairs=pairs, every=every, **plan)
    steps = 60 + plan.get("warm_up", 0)
    assert len(seen) == steps + 1  # it did not start again
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert all((a == b).all() for a, b in zip(whole.codes, resumed.codes, strict=True))


def test_every_item_is_seen_once_a_pass(tmp_path, monkeypatch):
    rows = []
    usual = RQVAE.losses

    def watched(self, inputs, **kwargs):
        rows.append(inputs[0][:, 0].tolist())
        return usual(self, inputs, **kwargs)

    monkeypatch.setattr(RQVAE, "losses", watched)
    x = vectors()
    x[:, 0] = np.arange(60)
    fitted(tmp_path / "a", x, steps=8)
    assert [len(batch) for batch in rows] == [16, 16, 16, 12] * 2
    for start in (0, 4):
        assert sorted(x for batch in rows[start : start + 4] for x in batch) == list(range(60))
    assert rows[0] != rows[4]


def test_two_channels_report_their_dependence(tmp_path):
    result = fitted(tmp_path / "a", cfg=config(channels=2, rotation="householder"))
    assert len(result.codes) == len(result.books) == 2
    assert 0 < result.statistics["normalised_mutual_information"] < 1
    assert result.statistics["orthogonality_error"] < 1e-5
    assert len(result.statistics["quantisation_error"]) == 2


def test_contrastive_pairs_pull_their_items_together(tmp_path):
    # items 2k and 2k+1 are pairs; their vectors are independent
    x = np.random.default_rng(1).standard_normal((60, 6)).astype(np.float32)
    pairs = np.arange(60).reshape(30, 2)
    plan = {"steps": 300, "warm_up": 100, "learning_rate": 5e-3, "pair_batch": 30}
    pulled = fitted(tmp_path / "a", x, config(pair_weight=3.0), pairs, **plan)
    free = fitted(tmp_path / "b", x, **plan)
    shared = [(f.codes[0][0::2, 0] == f.codes[0][1::2, 0]).mean() for f in (pulled, free)]
    assert shared[0] > shared[1] + 0.2


def test_wrong_arrays_are_refused(tmp_path):
    bad = vectors()
    bad[3, 2] = np.nan
    for x, cfg, pairs in (
        (vectors(width=5), config(), None),
        (bad, config(), None),
        ([vectors(), vectors(50)], config(inputs=(6, 6), hidden=((8,), (8,))), None),
        (vectors(), config(pair_weight=1.0), None),
        (vectors(), config(), np.zeros((3, 2), dtype=np.int64)),
    ):
        with pytest.raises(ConfigError):
            fitted(tmp_path / "a", x, cfg, pairs)
