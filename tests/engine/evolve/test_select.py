"""Scores, ties, elitism, failures and the hash chain."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_track import Toy, block_of, make_config

from auto_research.evolve.select import choose, hash_chain, score_parts, tie_key
from auto_research.runtime.errors import RunFailure


def trial(values_by_seed, replicates=None):
    seeds = []
    for number, values in enumerate(values_by_seed):
        seeds.append(
            {
                "fitness": sum(values) / len(values),
                "units": {"values": values},
                "replicates": replicates[number] if replicates else [],
                "metrics": {},
            }
        )
    return {"per_seed": seeds}


def test_score_by_hand():
    # units 1, 2, 3: sd 1, se 1/sqrt(3)
    parts = score_parts(trial([[1.0, 2.0, 3.0]]), z=1.0)
    assert parts["se_unit"] == pytest.approx(1 / math.sqrt(3))
    assert parts["se_seed"] == 0.0
    assert parts["score"] == pytest.approx(2.0 - 1 / math.sqrt(3))


def test_the_larger_of_both_standard_errors_counts():
    # unit means over seeds are 2, 2: se_unit 0; seeds are 1 and 3: sd sqrt(2), se 1
    parts = score_parts(trial([[1.0, 1.0], [3.0, 3.0]]), z=2.0)
    assert (parts["se_unit"], parts["se_seed"]) == (0.0, pytest.approx(1.0))
    assert parts["score"] == pytest.approx(0.0)


def test_replicates_replace_the_mean_over_units():
    parts = score_parts(trial([[1.0, 1.0]], replicates=[[1.0, 2.0, 3.0]]), z=1.0)
    assert parts["se_unit"] == pytest.approx(1.0)


@given(st.floats(0.001, 0.2), st.floats(0.3, 0.9))
def test_a_wider_spread_at_equal_mean_lowers_the_score(spread, mean):
    narrow = score_parts(trial([[mean - spread, mean, mean + spread]]), 1.0)["score"]
    wide = score_parts(trial([[mean - 2 * spread, mean, mean + 2 * spread]]), 1.0)["score"]
    assert wide < narrow


def row(name, score, parameters=10, flops=1.0, generation=1, eligible=True):
    return {
        "trial_id": name, "score": score, "parameters": parameters, "flops": flops, "generation": generation, "eligible": eligible,
    }  # fmt: skip


def test_ties_go_to_fewer_parameters_then_flops_then_generation_then_id():
    rows = [
        row("d", 0.5),
        row("c", 0.5, generation=0),
        row("b", 0.5, flops=0.5),
        row("a", 0.5, parameters=9),
        row("e", 0.5),
    ]
    assert [entry["trial_id"] for entry in sorted(rows, key=tie_key)] == ["a", "b", "c", "d", "e"]


def test_a_child_that_only_ties_never_replaces_the_parent():
    parent = row("p", 0.5, parameters=99)
    assert choose([row("c", 0.5 + 4e-10, parameters=1)], parent, make_config())[0] is parent
    child = row("c", 0.5 + 2e-9)
    assert choose([child], parent, make_config())[0] is child
    assert choose([child], parent, make_config(min_improvement=0.01))[0] is parent


def test_the_parent_competes_with_its_recorded_score_and_is_not_trained_again(toy):
    run = toy(4)
    assert len(run.trained) == len(set(run.trained))
    champions = [selection["deterministic"]["champion"] for selection in run.selections]
    scores = [champion["score"] for champion in champions]
    assert scores == sorted(scores)


@pytest.mark.parametrize("status", ["failed", "timeout", "oom", "nonfinite", "invalid"])
def test_a_generation_in_which_all_children_fail_keeps_the_parent_and_goes_on(toy, status):
    def fails(record):
        return block_of(record, status=status if record["generation"] == 1 else "completed")

    run = toy(3, trial=fails)
    block = run.selections[1]["deterministic"]
    assert block["champion"]["trial_id"] == run.candidates[0]["candidates"][0]["trial_id"]
    failed = [entry for entry in block["ranking"] if entry["status"] == status]
    assert len(failed) == 2
    assert all(entry["score"] is None and not entry["eligible"] for entry in failed)
    assert set(block["failed_operators"]) == {"mixing", "mixture"}
    assert len(run.selections) == 4
    assert all(run.champion["trial_id"] != entry["trial_id"] for entry in failed)


def test_a_baseline_that_does_not_complete_ends_the_run(toy):
    with pytest.raises(RunFailure, match="baseline ended as nonfinite"):
        toy(0, trial=lambda record: block_of(record, status="nonfinite"))


def test_a_guard_makes_a_child_ineligible_and_says_so(toy):
    run = toy(
        3,
        trial=lambda r: block_of(
            r, fitness=0.5 if not r["generation"] else 0.9, parameters=1 if not r["generation"] else 101
        ),
    )
    assert run.champion["generation"] == 0
    assert run.selections[1]["deterministic"]["ranking"][0]["why_not"] == "guard: parameters 101 > 100 x baseline 1"


def test_a_metric_that_is_not_finite_is_not_eligible(toy):
    def odd(record):
        block = block_of(record)
        if record["generation"] and record["slot"] == 0:
            block["per_seed"][0]["metrics"]["other"] = None
        return block

    assert toy(1, trial=odd).selections[1]["deterministic"]["ranking"][0]["eligible"]


def test_too_few_seeds_are_not_promoted(toy):
    with pytest.raises(RunFailure, match="fewer than 3 seeds"):
        toy(1, promotion_min_seeds=3)


def test_the_controller_follows_the_metric_and_not_the_queue(toy):
    run = toy(
        8,
        population=4,
        trial=lambda record: block_of(record, fitness=1.0 / (1 + size(record["genome"])), units=[0.1] * 3),
    )
    found = min((record for record in run.records() if record["genome"]), key=lambda record: size(record["genome"]))
    assert size(run.champion["genome"]) == size(found["genome"])


def size(genome):
    return genome["width"] * {"plain": 3, "mix": 2, "deep": 1}[genome["block"]] + (
        5 if genome["channel"] == "moe" else 0
    )


def test_the_chain_covers_config_candidates_trials_and_history(toy):
    run = toy(2)
    chains = [selection["deterministic"]["chain"] for selection in run.selections]
    assert len(set(chains)) == 3
    assert toy(2, direction="other").selections[0]["deterministic"]["chain"] != chains[0]
    block = block_of(run.candidates[0]["candidates"][0])
    base = hash_chain(b"c", b"x", [block], None)
    assert hash_chain(b"c", b"x", [{**block, "status": "failed"}], None) != base
    assert hash_chain(b"c", b"y", [block], None) != base
    assert hash_chain(b"d", b"x", [block], None) != base
    assert hash_chain(b"d", b"x", [block], run.selections[0]) == hash_chain(b"c", b"x", [block], run.selections[0])


def test_permuting_slots_or_relabelling_changes_no_score():
    run = Toy(make_config()).run(1)
    scores = {entry["trial_id"]: entry["score"] for entry in run.selections[1]["deterministic"]["ranking"]}
    records = [record for record in run.candidates[1]["candidates"] if record["status"] == "run"]
    again = {
        record["trial_id"]: score_parts(block_of({**record, "slot": 7 - record["slot"]}), 1.0)["score"]
        for record in records
    }
    assert all(scores[name] == value for name, value in again.items())


def test_trial_files_that_do_not_belong_to_the_candidates_are_refused():
    from auto_research.evolve.propose import propose
    from auto_research.evolve.select import select

    config = make_config()
    document = propose(config, 0, None)
    other = {**block_of(document["candidates"][0]), "trial_id": "g00-s00-00000000"}
    with pytest.raises(RunFailure, match="do not match"):
        select(config, b"", document, b"", [other], None)
