"""Test data are readable only with the hash of a lock."""

import pytest
from local_run import TRAINING, LocalRun, use_toy_root

from auto_research.evolve.final import final_test, lock
from auto_research.evolve.report import build_report
from auto_research.experiment.search import SealedData, reads_before, refuse_sealed, unseal
from auto_research.runtime.errors import RunFailure
from auto_research.runtime.files import read_json, sha256_file, write_json


@pytest.fixture
def run(tmp_path, monkeypatch):
    use_toy_root(monkeypatch, tmp_path)
    made = LocalRun()
    made.generation(0)
    return made


def test_sealed_opens_with_the_hash_of_a_lock_and_with_nothing_else(run):
    sealed = run.folder / "sealed"
    for token in ("", "0" * 64):
        with pytest.raises(SealedData):
            unseal(sealed, token)
    path = lock(run.folder, 0)
    token = sha256_file(path)
    assert unseal(sealed, token) == sealed
    path.write_text(path.read_text() + " ")
    with pytest.raises(SealedData):
        unseal(sealed, token)


def test_a_development_loader_refuses_a_sealed_path(run):
    with pytest.raises(SealedData):
        refuse_sealed(run.folder / "sealed" / "rows.json")
    assert refuse_sealed(run.folder / "dev") == run.folder / "dev"


def test_reads_are_counted_per_lock_and_a_resumed_test_is_no_new_read(run):
    token = sha256_file(lock(run.folder, 0))
    for _ in range(2):
        unseal(run.folder / "sealed", token)
    assert len((run.folder / "test_reads.jsonl").read_text().splitlines()) == 1
    run.generation(1)
    second = sha256_file(lock(run.folder, 1))
    unseal(run.folder / "sealed", second)
    assert (reads_before(run.folder, token), reads_before(run.folder, second)) == (0, 1)


def test_an_existing_test_is_never_computed_again(run):
    lock(run.folder, 0)
    path = final_test(run.folder, 0, "baseline", **TRAINING)
    write_json(run.folder / "sealed" / "rows.json", [9.0])
    before = path.read_bytes()
    final_test(run.folder, 0, "baseline", **TRAINING)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("first", "second"), [("baseline", "champion"), ("champion", "baseline")])
def test_a_champion_that_is_the_baseline_is_trained_once(run, first, second):
    lock(run.folder, 0)  # after generation 0 they are one
    tested = read_json(final_test(run.folder, 0, first, **TRAINING))
    write_json(run.folder / "sealed" / "rows.json", [9.0])  # would change the numbers
    taken = read_json(final_test(run.folder, 0, second, **TRAINING))
    assert taken["telemetry"] == {"seconds": 0.0, "attempts": 0, "same_as": first}
    assert {**taken, "telemetry": None, "which": None} == {**tested, "telemetry": None, "which": None}
    assert taken["which"] == second


def test_another_champion_or_lock_is_trained(run):
    lock(run.folder, 0)
    path = final_test(run.folder, 0, "baseline", **TRAINING)
    write_json(path, {**read_json(path), "lock": "0" * 64})
    assert "same_as" not in read_json(final_test(run.folder, 0, "champion", **TRAINING))["telemetry"]
    for g in (1, 2, 3):
        chosen = run.generation(g)
        if chosen["champion"]["trial_id"] != chosen["baseline"]["trial_id"]:
            break
    else:
        pytest.fail("the toy's champion never left the baseline")
    lock(run.folder, g)
    for which in ("baseline", "champion"):
        assert "same_as" not in read_json(final_test(run.folder, g, which, **TRAINING))["telemetry"]


def test_a_test_that_cannot_complete_is_an_error(run):
    lock(run.folder, 0)
    (run.folder / "sealed" / "rows.json").write_text("not json")
    with pytest.raises(RunFailure, match="sealed test of baseline"):
        final_test(run.folder, 0, "baseline", **TRAINING)


def test_the_report_refuses_a_test_of_another_lock(run):
    run.finish(0)
    path = run.folder / "final" / "g0" / "LOCK.json"
    write_json(path, {**read_json(path), "selection": "0" * 64})
    with pytest.raises(RunFailure, match="another champion"):
        build_report(run.folder, 0)


def test_reading_again_after_more_generations_is_exploratory_at_full_budget(run):
    run.finish(0)
    run.generation(1)
    page = run.finish(1)
    report = read_json(page.parent / "report.json")
    assert report["test_reads_before"] == 1
    assert report["claim"] == "smoke"  # a quick budget never claims more, whatever else holds
