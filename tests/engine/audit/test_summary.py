"""Summaries count honestly, name what changed, and stay readable whatever an error message holds."""

import pytest
from test_receipts import gpu_row

from auto_research.audit import pages, receipts, records
from auto_research.audit.summary import difference, merge_rows, summarise
from auto_research.experiment.card import discover
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.files import read_json
from auto_research.runtime.paths import checkout_root
from auto_research.runtime.schema import validate


def row(adapter: str, status: str = "cpu_pass", device: str = "cpu", seconds: float = 2.0, error=None) -> dict:
    return gpu_row(adapter=adapter, status=status, device=device, seconds=seconds, error=error, peak_memory_bytes=None)


def summary(rows, expected=("a", "b", "c"), device="cpu", **more):
    return validate(summarise(rows, device=device, tier="smoke", expected=expected, **more), "audit_summary")


def test_counts_failures_and_missing_rows():
    error = {"type": "RuntimeError", "message": "boom"}
    made = summary([row("b", "failed", error=error), row("a")], skipped={"d": "concept demo"})
    assert made["counts"] == {"cpu_pass": 1, "failed": 1}
    assert made["passes"] == ["a"]
    assert made["missing"] == ["c"]
    assert made["valid_seconds"] == 2.0
    assert made["failures"] == [{"adapter": "b", "status": "failed", "seconds": 2.0, "error": error}]
    assert not made["complete"]
    assert summary([row("a"), row("b"), row("c")])["complete"]


def test_a_cpu_pass_never_counts_for_a_gpu():
    made = summary([row("a", "cpu_pass", device="cuda:0")], expected=["a"], device="cuda:0")
    assert made["passes"] == []
    assert not made["complete"]


def test_shards_in_any_order_give_one_summary():
    rows = [row(key) for key in "abc"]
    documents = [
        records.shard_document(
            [one], device="cpu", tier="smoke", shards=3, index=index, expected=[one["adapter"]], skipped={"z": "demo"}
        )
        for index, one in enumerate(rows)
    ]
    whole = records.shard_document(
        rows, device="cpu", tier="smoke", shards=1, index=None, expected=list("abc"), skipped={"z": "demo"}
    )
    assert records.merge_documents(documents[::-1]) == records.merge_documents([whole])


def test_rows_that_do_not_belong_together_are_refused():
    with pytest.raises(ConfigError, match="overlap"):
        merge_rows([[row("a")], [row("a")]])
    with pytest.raises(ConfigError, match="different devices"):
        merge_rows([[row("a")], [row("b", device="shadow", status="shadow_pass")]])


def test_the_difference_names_what_came_went_and_changed():
    before = summary([row("a", "failed"), row("b"), row("gone")], expected=["a", "b", "gone"])
    assert difference(before, [row("a"), row("b"), row("c")]) == {
        "added": ["c"],
        "removed": ["gone"],
        "changed": [{"adapter": "a", "before": "failed", "after": "cpu_pass"}],
        "unchanged": 1,
    }
    assert difference(None, [row("a")]) is None


def test_pages_show_every_row_and_escape_messages():
    error = {"type": "ValueError", "message": "<script>alert(1)</script> a | b"}
    made = summary([row("a"), row("b", "failed", error=error)], previous=summary([row("a")]))
    page, text = pages.html(made), pages.markdown(made)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "a \\| b" in text
    for shown in (page, text):
        assert "1 of 3 adapters passed; 1 failed, 1 without a row." in shown
        assert pages.CLAIM in shown
        assert "b: new" in shown


def test_a_failed_row_leaves_a_record_and_no_row(tmp_path):
    out, failure = tmp_path / "rows" / "a.json", tmp_path / "failures" / "a.json"
    assert not records.write_row(row("a", "timeout"), out, failure)
    assert (out.exists(), read_json(failure)["status"]) == (False, "timeout")
    assert records.write_row(row("a"), out, failure)
    assert (read_json(out)["status"], failure.exists()) == ("cpu_pass", False)
    assert not records.write_row(row("a", "failed"), out, failure)
    assert not out.exists()


def test_the_committed_evidence_is_sound():
    root = checkout_root()
    assert receipts.evidence_problems(discover(root), root / receipts.FOLDER) == []
