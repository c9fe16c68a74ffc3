import math

import numpy as np
import pytest

from auto_research.results.verdict import Difference, difference, higher_is_better, verdict


def record(seed, metrics, units=None, rows=None):
    return {"seed": seed, "measurement": {"metrics": metrics, "units": units or {}, "rows": rows}}


def units(ids, values):
    return {"ndcg@10": {"kind": "user", "ids": ids, "values": values}}


def test_contributions_are_averaged_over_shared_seeds_before_pairing():
    # per user over seeds: arm (2, 4), other (1, 3): every difference is 1, so the interval is a point
    arm = {
        1: record(1, {"ndcg@10": 2.0}, units([7, 8], [1.0, 3.0])),
        2: record(2, {"ndcg@10": 4.0}, units([7, 8], [3.0, 5.0])),
        3: record(3, {"ndcg@10": 9.0}, units([7, 8], [9.0, 9.0])),
    }
    other = {
        1: record(1, {"ndcg@10": 1.0}, units([7, 8], [2.0, 0.0])),
        2: record(2, {"ndcg@10": 3.0}, units([7, 8], [0.0, 6.0])),
    }
    found = difference(arm, other, "ndcg@10")
    assert (found.delta, found.low, found.high) == (1.0, 1.0, 1.0)
    assert found.relative == 0.5


def test_units_are_paired_by_id_and_not_by_position():
    arm = {1: record(1, {"ndcg@10": 0.5}, units([1, 2, 3], [0.0, 0.5, 1.0]))}
    other = {1: record(1, {"ndcg@10": 0.5}, units([3, 1, 9, 2], [1.0, 0.0, 0.5, 0.5]))}
    found = difference(arm, other, "ndcg@10")
    assert (found.low, found.high) == (0.0, 0.0)
    assert "3 units" in found.method


def test_auc_and_logloss_come_from_rows():
    rng = np.random.default_rng(0)
    user, label = np.repeat(np.arange(40), 10), rng.integers(0, 2, 400)
    good, bad = 0.5 + 0.4 * (label - 0.5), np.full(400, 0.5)

    def rows(score):
        return {"user": user.tolist(), "label": label.tolist(), "score": score.tolist()}

    arm = {s: record(s, {"auc": 1.0, "logloss": -math.log(0.7)}, rows=rows(good)) for s in (1, 2)}
    other = {s: record(s, {"auc": 0.5, "logloss": math.log(2)}, rows=rows(bad)) for s in (1, 2)}
    auc, loss = (difference(arm, other, name) for name in ("auc", "logloss"))
    assert (auc.delta, auc.low, auc.high) == (0.5, 0.5, 0.5)
    assert loss.low == pytest.approx(math.log(0.5 / 0.7)) == loss.high
    other[1]["measurement"]["rows"]["user"] = other[1]["measurement"]["rows"]["user"][::-1]
    assert difference(arm, other, "auc").low is None


def test_no_shared_seed_or_metric_is_no_difference():
    arm, other = {1: record(1, {"auc": 0.6})}, {2: record(2, {"auc": 0.5})}
    assert difference(arm, other, "auc") is None
    assert difference(arm, {1: record(1, {"hit@10": 1.0})}, "auc") is None
    assert difference(arm, {1: record(1, {"auc": 0.5})}, "auc").low is None


@pytest.mark.parametrize(
    ("low", "high", "higher", "seeds", "tier", "floors", "expected"),
    [
        (0.1, 0.2, True, 3, "standard", [], "improves"),
        (0.1, 0.2, True, 3, "standard", ["popularity"], "no-difference"),
        (0.1, 0.2, True, 2, "standard", [], "smoke"),
        (0.1, 0.2, True, 3, "smoke", [], "smoke"),
        (0.1, 0.2, True, 3, "tiny", [], "smoke"),
        (-0.1, 0.2, True, 3, "standard", [], "no-difference"),
        (0.0, 0.2, True, 3, "standard", [], "no-difference"),
        (-0.2, -0.1, True, 3, "standard", [], "worse"),
        (-0.2, -0.1, False, 3, "standard", [], "improves"),
        (0.1, 0.2, False, 3, "full", [], "worse"),
        (None, None, True, 3, "full", [], "no-difference"),
    ],
)
def test_claims(low, high, higher, seeds, tier, floors, expected):
    found = Difference(0.1, None, low, high, "x")
    name, reason = verdict(found, tier=tier, shared_seeds=seeds, higher=higher, floors_not_beaten=floors)
    assert name == expected
    assert reason


def test_direction_of_a_metric():
    assert higher_is_better("auc", "auc", "max")
    assert not higher_is_better("gap", "gap", "min")
    assert not higher_is_better("logloss", "auc", "max")
    assert higher_is_better("ndcg@10", "auc", "max")
