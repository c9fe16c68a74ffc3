"""The proposal is a pure function of files; every invariant of the controller that a toy track can show."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_track import DEFINITION, Toy, block_of, make_config

from auto_research.evolve.genome import effective, fingerprint, inert_genes
from auto_research.evolve.propose import base_queue, build_queue, mutable, propose
from auto_research.evolve.streams import stream
from auto_research.experiment.search import track_from
from auto_research.runtime.files import canonical_json

TRACK = track_from(DEFINITION)
NOTHING = {"tried": [], "failed_operators": []}


def test_generation_zero_holds_the_baseline_only(toy):
    (record,) = toy(0).candidates[0]["candidates"]
    assert record["genome"] == TRACK.baseline()
    assert record["trial_id"] == f"g00-s00-{record['effective_fingerprint'][:8]}"


def test_same_files_same_bytes_whatever_the_completion_order(toy):
    runs = [toy(6, order=order) for order in (None, 1, 2, 3)]
    assert len({tuple(run.texts()) for run in runs}) == 1
    assert len({run.selections[-1]["deterministic"]["chain"] for run in runs}) == 1


def test_growing_a_run_equals_asking_at_once(toy):
    assert toy(3).run(6).texts() == toy(6).texts()
    assert toy(3).run(6).selections == toy(6).selections


def test_a_run_resumed_from_its_files_decides_the_same(toy):
    whole = toy(5)
    resumed = Toy(
        make_config(), block_of, None, copy.deepcopy(whole.candidates[:2]), copy.deepcopy(whole.selections[:2])
    )
    assert resumed.run(5).selections[-1] == whole.selections[-1]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_every_child_differs_in_exactly_the_listed_allowed_active_genes(seed, population):
    run = Toy(make_config(run_seed=seed, population=population)).run(5)
    for g, document in enumerate(run.candidates[1:], start=1):
        parent = run.selections[g - 1]["deterministic"]["champion"]["genome"]
        assert [record["slot"] for record in document["candidates"]] == list(range(population))
        for record in document["candidates"]:
            if record["status"] == "skipped":
                assert record["reason"] == "search-space-exhausted"
                continue
            changed = {name for name in parent if parent[name] != record["genome"][name]}
            assert changed == {change["gene"] for change in record["changed"]}
            assert not changed & inert_genes(record["genome"], TRACK)
            assert all(mutable(TRACK.by_name[name], g) for name in changed)
            structural = {TRACK.by_name[name].structural for name in changed}
            expected = 1 if g < 4 or record["slot"] % 2 == 0 else 2
            assert len(changed) == expected
            assert structural == {g in (1, 2) or (g > 3 and record["slot"] % 2 == 0)}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_no_effective_fingerprint_is_trained_twice(seed):
    run = Toy(make_config(run_seed=seed, population=4)).run(8)
    marks = [r["effective_fingerprint"] for r in run.records() if r["status"] == "run"]
    assert len(marks) == len(set(marks))
    assert sorted(run.trained) == sorted(r["trial_id"] for r in run.records() if r["status"] == "run")


def test_an_exhausted_space_gives_skipped_slots_and_the_run_goes_on(toy):
    run = toy(2, population=9)
    statuses = [record["status"] for record in run.candidates[1]["candidates"]]
    # plain -> mix, deep, moe are all single structural changes there are
    assert statuses == ["run"] * 3 + ["skipped"] * 6
    assert len(run.selections) == 3


def test_a_planted_duplicate_and_an_inert_variant_start_no_job(toy):
    planted = {"1": [{}, {"experts": 4}]}
    run = toy(1, definition={"planted": planted}, population=3)
    first, second, third = run.candidates[1]["candidates"]
    baseline = run.candidates[0]["candidates"][0]["trial_id"]
    assert (first["status"], first["reuse_of"]) == ("reused", baseline)
    assert (second["status"], second["reuse_of"]) == ("reused", baseline)
    assert third["status"] == "run"
    assert run.trained == [baseline, third["trial_id"]]


def test_a_planted_genome_outside_the_space_becomes_a_trial_that_can_report_it(toy):
    run = toy(1, definition={"planted": {"1": [{"width": 7}]}}, trial=_invalid_when_planted)
    record = run.candidates[1]["candidates"][0]
    assert record["status"] == "run"
    assert record["genome"]["width"] == 7
    assert run.selections[1]["deterministic"]["archive"][record["effective_fingerprint"]]["status"] == "invalid"


def _invalid_when_planted(record):
    return block_of(record, status="invalid" if record["source"] == "planted" else "completed")


def test_queue_has_first_values_then_further_values_then_values_of_no_operator():
    definition = copy.deepcopy(DEFINITION)
    definition["operators"][0]["values"] = ["mix", "deep"]
    keys = [entry.key for entry in base_queue(track_from(definition))]
    assert keys == [
        "mixing:block=mix",
        "mixture:channel=moe",
        "mixing:block=deep",
        "block:block=plain",
        "channel:channel=ffn",
    ]


@pytest.mark.parametrize("direction", ["try SPARSE layers", "请尝试稀疏专家", "mixture", "moe first"])
def test_direction_moves_matching_entries_to_the_front(direction):
    assert build_queue(TRACK, direction, NOTHING, [])[0].key == "mixture:channel=moe"


@pytest.mark.parametrize("direction", ["", "sparsely moenian mixtures", "unrelated"])
def test_only_whole_words_of_the_direction_count(direction):
    assert build_queue(TRACK, direction, NOTHING, [])[0].key == "mixing:block=mix"


def test_a_failed_operator_cools_down_for_one_generation_and_comes_back():
    failed = {"tried": ["mixing:block=mix"], "failed_operators": ["mixing"]}
    assert build_queue(TRACK, "", failed, [])[-1].key == "mixing:block=mix"
    later = {"tried": ["mixing:block=mix"], "failed_operators": []}
    keys = [entry.key for entry in build_queue(TRACK, "", later, [])]
    assert keys[-1] == "mixing:block=mix"
    assert len(keys) == len(base_queue(TRACK))


def test_upper_half_of_generation_one_is_combined_in_generation_two(toy):
    run = toy(2)
    assert run.selections[1]["deterministic"]["champion"]["genome"]["channel"] == "moe"
    first = run.candidates[2]["candidates"][0]
    assert first["genome"]["block"] == "deep" or first["genome"]["block"] == "mix"
    assert first["genome"]["channel"] == "moe"
    # mix was tried in generation 1 and ranked below moe: only the upper half is moved to the front
    assert run.candidates[2]["queue"][0] != "mixing:block=mix"


def test_generation_three_draws_from_private_streams_only(toy):
    run = toy(3)
    values = []
    for record in run.candidates[3]["candidates"]:
        (change,) = record["changed"]
        gene = TRACK.by_name[change["gene"]]
        options = [value for value in gene.allowed if value != change["from"]]
        rng = stream("toy", 1, "value", 3, record["slot"], record["attempts"] - 1)
        values.append(change["to"] == options[int(rng.integers(len(options)))])
    assert all(values)
    assert [record["changed"][0]["gene"] for record in run.candidates[3]["candidates"]] == ["width", "rate"]


def test_another_seed_draws_other_values():
    texts = {canonical_json(Toy(make_config(run_seed=seed)).run(3).candidates[3]["candidates"]) for seed in range(6)}
    assert len(texts) > 1


def test_stream_is_pcg64_of_the_first_eight_bytes_of_sha256():
    import hashlib

    import numpy as np

    digest = hashlib.sha256(b"toy|1|value|3|0|0").digest()
    expected = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "big"))).random(3)
    assert np.array_equal(stream("toy", 1, "value", 3, 0, 0).random(3), expected)


def test_an_illegal_child_is_passed_over(toy):
    rule = [{"when": {"channel": ["moe"]}, "reason": "no"}]
    run = toy(3, definition={"illegal": rule}, population=3)
    assert all(r["genome"]["channel"] == "ffn" for r in run.records() if r["status"] == "run")


def test_a_retrieved_paper_is_never_queued():
    definition = copy.deepcopy(DEFINITION)
    definition["operators"][0]["source"] = "retrieved-paper"
    assert not [entry for entry in base_queue(track_from(definition)) if ("block", "mix") in entry.sets]


def test_a_preset_sets_several_genes_when_the_generation_allows_it(toy):
    definition = copy.deepcopy(DEFINITION)
    definition["operators"].insert(
        0, {"name": "both", "gene": "block", "values": ["mix"], "sets": {"block": "mix", "channel": "moe"}}
    )
    definition["generations"][0]["slots"] = [{"genes": "structural", "changes": 2}]
    record = toy(1, definition=definition, population=1).candidates[1]["candidates"][0]
    assert {change["gene"] for change in record["changed"]} == {"block", "channel"}
    assert record["operator"] == "both"


def test_the_parent_of_a_proposal_is_named_with_the_hash_of_its_selection(toy):
    run = toy(2)
    before = run.selections[1]["deterministic"]
    assert run.candidates[2]["parent"] == {
        "trial_id": before["champion"]["trial_id"],
        "effective_fingerprint": fingerprint(effective(before["champion"]["genome"], TRACK)),
        "selection": before["chain"],
    }
    assert propose(make_config(), 0, None)["parent"] is None
