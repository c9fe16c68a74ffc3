import json
import re
import shutil

import pytest

pytestmark = pytest.mark.workflow
TOY = ("reproduce_toy", "--config", "tier=tiny")


def jobs(text):
    """Rule -> number of jobs in Snakemake's job table, without the target rule."""
    found = re.findall(r"^(\w+) +(\d+)$", text, flags=re.MULTILINE)
    return {rule: int(count) for rule, count in found if rule not in ("total", "reproduce_toy")}


def test_everything_is_made_once_and_the_second_call_does_nothing(finished):
    folder = finished.folder()
    result = json.loads((folder / "result.json").read_text())
    assert result["claim"] == "smoke"
    assert set(result["arms"]) == {"popularity", "slow", "plain"}
    assert result["runtime"]["cpu_threads"] == 2 or result["runtime"]["cpu_threads"] == 1
    assert (folder / "report.md").is_file()
    assert (folder / "curves.svg").is_file()
    assert [path.name for path in (finished.work / "results" / "state").iterdir()] == [".locks"]
    assert not (folder / "failures").exists()
    assert "Nothing to be done" in finished.snakemake(*TOY)


def test_words_rerun_nothing_and_code_reruns_its_users(finished):
    finished.edit("toy/model.py", '    """The next value."""\n', "    # a comment instead of a docstring\n")
    finished.edit("toy/card.yaml", "gpu: {path: false}", "gpu: {path: false, notes: a note}")
    (finished.root / "adapters" / "toy" / "NOTES.md").write_text("words")
    assert "Nothing to be done" in finished.snakemake("-n", *TOY)
    finished.edit("toy/card.yaml", "switch: {width: 1}", "switch: {width: 2}")
    assert jobs(finished.snakemake("-n", *TOY)) == {"arm": 1, "compare": 1}
    finished.edit("toy/card.yaml", "switch: {width: 2}", "switch: {width: 1}")
    finished.edit("toy/model.py", "rate * (step + 1)", "rate * (step + 2)")
    assert jobs(finished.snakemake("-n", *TOY)) == {"arm": 3, "artifact": 1, "compare": 1}


def test_a_mixture_is_refused_even_when_snakemake_forgot_everything(finished):
    shutil.rmtree(finished.work / ".snakemake")
    assert "Nothing to be done" in finished.snakemake("-n", *TOY)
    finished.edit("toy/model.py", "rate * (step + 1)", "rate * (step + 2)")
    text = finished.script("compare_arms.py", "--adapter", "toy", "--tier", "tiny", code=2)
    assert text.count("\n") == 1
    assert text.startswith("error: ")
    assert "was made by other code" in text
    assert (
        json.loads((finished.folder() / "failures" / "compare-result-seed0.json").read_text())["error"] == "StaleOutput"
    )


def test_a_missing_arm_behind_a_result_is_made_again(finished):
    (finished.folder() / "seed42" / "arms" / "plain.json").unlink()
    assert jobs(finished.snakemake("-n", *TOY)) == {"arm": 1, "compare": 1}


def test_seeds_of_the_command_line_count_for_all_arms_and_follow_the_tuning_seed(bench):
    text = bench.snakemake("-n", "reproduce_toy", "--config", "tier=standard", "seeds=43,44")
    # slow and plain choose on seed 42 first; popularity has one trial and nothing to choose
    assert jobs(text) == {"arm": 8, "artifact": 3, "compare": 1}
    assert jobs(bench.snakemake("-n", "reproduce_toy", "--config", "tier=standard")) == {
        "arm": 5,
        "artifact": 3,
        "compare": 1,
    }


def test_a_failure_is_kept_aside_and_only_it_is_repeated(bench):
    (bench.meet / "fail-slow").touch()
    text = bench.snakemake(*TOY, code=1)
    folder = bench.folder()
    record = json.loads((folder / "failures" / "arm-slow-seed42.json").read_text())
    assert (record["error"], record["message"]) == ("NonFinite", "arm slow: loss became nan at step 0")
    assert (bench.work / record["log"]).read_text().strip().endswith("error: arm slow: loss became nan at step 0")
    assert "loss became nan" in text
    assert "NonFinite" in (folder / "summary.partial.md").read_text()
    assert not (folder / "result.json").exists()
    assert sorted(path.stem for path in (folder / "seed42" / "arms").iterdir()) == ["plain", "popularity"]

    (bench.meet / "fail-slow").unlink()
    before = bench.trace("plain")
    bench.snakemake(*TOY)
    assert bench.trace("plain") == before
    assert (folder / "result.json").is_file()
    assert not (folder / "failures").exists()
    assert not list(folder.glob("summary.partial.*"))


def test_the_report_has_captions_and_categories(finished):
    finished.snakemake("reproduce_toy", "--report", "report.html", "--config", "tier=tiny")
    page = (finished.work / "report.html").read_text()
    assert "Reproductions" in page
    assert "paired-bootstrap intervals of every declared comparison" in page


def test_a_wrong_setting_is_one_line_and_exit_code_2(bench):
    for setting, message in (("colour=red", "'colour' was unexpected"), ("dataset=criteo", "not on 'criteo'")):
        text = bench.snakemake("-n", "reproduce_toy", "--config", setting, code=2)
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        assert message in lines[0]
        assert "Traceback" not in text


def test_a_card_with_an_unknown_field_and_a_broken_source_stop_before_any_job(bench):
    bench.edit("toy/card.yaml", "family: toys", "family: toys\nmood: good")
    assert "'mood' was unexpected" in bench.snakemake("-n", *TOY, code=2)
    bench.edit("toy/card.yaml", "family: toys\nmood: good", "family: toys")
    (bench.root / "adapters" / "toy" / "model.py").write_text("def grow(:\n")
    text = bench.snakemake("-n", *TOY, code=2)
    assert "model.py" in text
    assert "Traceback" not in text


def test_scripts_need_no_snakemake_and_say_what_is_wrong(bench):
    run = ("--adapter", "toy", "--tier", "tiny", "--device", "cpu")
    assert "does not exist" in bench.script("run_arm.py", *run, "--arm", "slow", code=2)
    bench.script("run_artifact.py", *run, "--artifact", "table")
    bench.script("run_arm.py", *run, "--arm", "slow")
    assert "is complete" in bench.script("run_arm.py", *run, "--arm", "slow")
    assert bench.trace("slow") == [0, 1, 2, 3]
    text = bench.script("run_arm.py", "--adapter", "toy", "--tier", "tiny", "--arm", "slowly", code=2)
    assert text == "error: adapter toy has no arm 'slowly'; it has popularity, slow, plain\n"
    text = bench.script("run_arm.py", "--adapter", "tiger", "--tier", "tiny", "--arm", "slow", code=2)
    assert text == "error: unknown adapter 'tiger'; known: toy\n"
