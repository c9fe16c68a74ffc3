"""Command lines of the audit scripts: one row, one shard document, the summary, and a whole audit without Snakemake."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from auto_research.audit import records
from auto_research.audit.graph import TIMEOUT_VARIABLE, AuditGraph, audit_device, papers_of, stale_rows
from auto_research.experiment.card import TIERS, Card, discover, find_card
from auto_research.experiment.commands import show_tracebacks
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.paths import code_root, dataset_dir


def session_main(arguments: Sequence[str] | None = None) -> int:
    """Audit adapters one after another without Snakemake; 0 when every one passed, 1 otherwise."""
    options = _session_flags().parse_args(arguments)
    show_tracebacks(options.debug)
    from auto_research.audit import session as audit
    from auto_research.audit.runner import Settings
    from auto_research.runtime.devices import requested_device
    from auto_research.runtime.lease import lease_for

    cards = discover(code_root())
    graph = _graph(options, cards, audit_device(options.device, requested_device()))
    settings = Settings(
        root=code_root(),
        device=graph.device,
        tier=graph.tier,
        timeout=options.timeout_seconds,
        data_root=options.data_root,
        logs=options.output.parent / (options.output.stem + ".logs"),
        dataset_dir=options.dataset_dir,
        dataset=graph.dataset,
        seed=options.seed,
    )
    earlier = [*options.durations, *([options.output] if options.output.is_file() else [])]
    session = audit.Session(
        settings,
        options.output,
        shards=graph.shards,
        index=graph.index,
        resume=options.resume,
        seconds=None if options.minutes is None else options.minutes * 60,
        durations=audit.known_durations(earlier) if options.shortest_first else None,
    )
    audit.check_device(graph.device)
    with lease_for(graph.device):
        summary = audit.run_session(cards, graph.selection, session)
    print(audit.table(summary))
    return 0 if summary["complete"] else 1


def row_main(arguments: Sequence[str] | None = None) -> int:
    """Audit one adapter: its row on a pass, else a record in failures and exit code 1."""
    flags = argparse.ArgumentParser(description="Audit one adapter on one device, alone in its own process group.")
    flags.add_argument("--adapter", required=True, help="key of the adapter, e.g. rankmixer")
    flags.add_argument("--device", required=True, help="cpu, mps, shadow, cuda or cuda:<index>")
    flags.add_argument("--tier", default="smoke", choices=TIERS)
    flags.add_argument("--dataset", help="default: the card's")
    flags.add_argument("--seed", type=int, default=42)
    flags.add_argument("--timeout-seconds", type=float, help=f"hard limit; default {TIMEOUT_VARIABLE}, else 600")
    flags.add_argument("--cpu-threads", type=int)
    flags.add_argument(
        "--dataset-dir", help="folder of downloaded data sets; default AUTO_RESEARCH_DATASET_DIR or data"
    )
    flags.add_argument("--data-root", type=Path, default=Path("results/data"), help="folder of prepared data sets")
    flags.add_argument("--fingerprint", help="recorded in the row; the hash of the sources when left out")
    flags.add_argument("--out", type=Path, required=True, help="the row")
    flags.add_argument("--failure", type=Path, required=True, help="the record where the row is no pass")
    flags.add_argument("--log", help="where the caller sends this output; named in the failure record")
    flags.add_argument("--debug", action="store_true", help="show tracebacks")
    options = flags.parse_args(arguments)
    show_tracebacks(options.debug)
    from auto_research.audit.runner import Settings, audit_adapter
    from auto_research.runtime.lease import lease_for
    from auto_research.runtime.process import die_with_parent

    die_with_parent()
    settings = Settings(
        root=code_root(),
        device=options.device,
        tier=options.tier,
        timeout=options.timeout_seconds or float(os.environ.get(TIMEOUT_VARIABLE) or 600),
        data_root=options.data_root,
        logs=None,
        log_name=options.log,
        dataset_dir=str(dataset_dir(options.dataset_dir)),
        dataset=options.dataset,
        seed=options.seed,
        threads=options.cpu_threads,
    )
    card = find_card(code_root(), options.adapter)
    with lease_for(options.device):
        row = audit_adapter(card, settings, fingerprint=options.fingerprint)
    passed = records.write_row(row, options.out, options.failure)
    reason = f": {row['error']['type']}: {row['error']['message']}" if row["error"] else ""
    print(f"{card.key} on {options.device}: {row['status']} in {row['seconds']:.1f} s{reason}", file=sys.stderr)
    return 0 if passed else 1


def shard_main(arguments: Sequence[str] | None = None) -> int:
    """Join the rows of one shard into its document."""
    flags = _graph_flags("Join the rows of one audit shard below results/audit into one document.")
    options = flags.parse_args(arguments)
    show_tracebacks(options.debug)
    graph = _graph(options, *_cards_with_fingerprints())
    if graph.index is None:
        raise ConfigError("--shard-index is missing: which shard?")
    rows = [records.read_row(graph.row(key)) for key in graph.adapters(graph.index)]
    if stale := stale_rows(graph, rows):
        files = " ".join(str(graph.row(key)) for key in stale)
        raise ConfigError(f"rows made by other code or budgets: delete them and run again: rm {files}")
    records.write_shard(graph.shard_file(graph.index), _document(graph, rows, graph.index))
    return 0


def summary_main(arguments: Sequence[str] | None = None) -> int:
    """Merge shard documents into the summary; with --partial, whatever rows and failures exist."""
    flags = _graph_flags("Summarise an audit: summary.json, .md and .html, with the difference to the last summary.")
    flags.add_argument("--partial", action="store_true", help="what exists so far, into summary.partial.*")
    flags.add_argument(
        "--rows", type=Path, nargs="+", help="shard documents to merge instead of those of results/audit"
    )
    flags.add_argument("--out", type=Path, help="with --rows: summary to write, without suffix")
    options = flags.parse_args(arguments)
    show_tracebacks(options.debug)
    if options.rows:
        if options.out is None:
            raise ConfigError("--rows needs --out: where to write the summary")
        summary = records.merge_documents([records.read_shard(path) for path in options.rows])
        records.write_summary(summary, options.out)
        return 0 if summary["complete"] else 1
    graph = _graph(options, *_cards_with_fingerprints())
    history = graph.folder / "history" / "last.json"
    previous = records.read_previous(history)
    partial = graph.folder / "summary.partial"
    if options.partial:
        document = _document(graph, _existing_rows(graph), None)
        records.write_summary(records.merge_documents([{**document, "shards": 1}], previous), partial, history)
        print(partial.with_name(partial.name + ".md"))
        return 0
    documents = [records.read_shard(Path(path)) for path in graph.shard_files()]
    summary = records.merge_documents(documents, previous)
    if not summary["complete"]:
        raise ConfigError(f"audit on {graph.device} is not complete: run snakemake audit_all")
    for suffix in (".json", ".md", ".html"):
        partial.with_name(partial.name + suffix).unlink(missing_ok=True)
    records.write_summary(summary, graph.folder / "summary", history)
    print(graph.folder / "summary.md")
    return 0


def receipts_main(arguments: Sequence[str] | None = None) -> int:
    """Write receipts for the passes of an audit on an accepted accelerator."""
    flags = argparse.ArgumentParser(description="Write de-identified receipts from rows of an audit on a real GPU.")
    flags.add_argument("rows", type=Path, nargs="+", help="documents of audit_gpu_paths.py, or single rows")
    flags.add_argument("--date", required=True, help="day of the run, YYYY-MM-DD")
    flags.add_argument("--out", type=Path, default=Path("docs/gpu-validations"))
    flags.add_argument("--debug", action="store_true", help="show tracebacks")
    options = flags.parse_args(arguments)
    show_tracebacks(options.debug)
    from auto_research.audit import receipts

    root = code_root()
    written, refused = receipts.write_receipts(root, options.rows, options.out, options.date)
    for path in written:
        print(path)
    for key, reason in refused.items():
        print(f"no receipt for {key}: {reason}", file=sys.stderr)
    return 0 if written and not refused else 1


def evidence_main(arguments: Sequence[str] | None = None) -> int:
    """Check the committed receipts against the cards; prints the state of each card that requires one."""
    flags = argparse.ArgumentParser(
        description="Check that every card that requires a GPU validation has its evidence."
    )
    flags.add_argument("--folder", type=Path, help="receipts; default docs/gpu-validations of the checkout")
    flags.add_argument("--debug", action="store_true", help="show tracebacks")
    options = flags.parse_args(arguments)
    show_tracebacks(options.debug)
    from auto_research.audit import receipts

    cards = discover(code_root())
    found = receipts.evidence_problems(cards, options.folder or code_root() / receipts.FOLDER)
    for key, state in receipts.validation_states(cards).items():
        print(f"{key}: {'not yet run on a GPU (pending)' if state == receipts.PENDING else state or 'nothing'}")
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 2 if found else 0


def _session_flags() -> argparse.ArgumentParser:
    flags = _graph_flags("Audit adapters on one device without Snakemake; every row is on disk at once.")
    flags.add_argument("--output", type=Path, default=Path("results/gpu-audit/audit.json"), help="rows of this audit")
    flags.add_argument("--resume", action="store_true", help="keep unchanged passes of OUTPUT and repeat the rest")
    flags.add_argument("--timeout-seconds", type=float, default=600.0, help="hard limit per adapter (600)")
    flags.add_argument("--dataset-dir", default="data", help="folder of downloaded data sets (data)")
    flags.add_argument("--data-root", type=Path, default=Path("results/data"), help="prepared data sets (results/data)")
    flags.add_argument("--seed", type=int, default=42, help="seed of every stage (42)")
    flags.add_argument("--minutes", type=float, help="start nothing after this many minutes")
    flags.add_argument("--shortest-first", action="store_true", help="longest adapters last")
    flags.add_argument("--durations", type=Path, action="append", default=[], help="earlier audit with known durations")
    return flags


def _graph_flags(description: str) -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument(
        "--device", help="cpu, mps, shadow, cuda or cuda:<index>; default AUTO_RESEARCH_DEVICE, else cpu"
    )
    flags.add_argument("--tier", default="smoke", choices=TIERS, help="budget tier (smoke)")
    flags.add_argument("--dataset", help="data set for the adapters that offer it; default the card's")
    flags.add_argument("--shards", type=int, default=1, help="number of shards (1)")
    flags.add_argument("--shard-index", type=int, help="this shard, counted from 0; all when left out")
    flags.add_argument("--paper", default="all", help="one key, several separated by commas, or all")
    flags.add_argument("--include-concept-demos", action="store_true", help="also adapters of fidelity concept_demo")
    flags.add_argument(
        "--only-explicit-device-packages",
        action="store_true",
        help="only adapters whose own folder calls device_for or uses torch.cuda",
    )
    flags.add_argument("--debug", action="store_true", help="show tracebacks")
    return flags


def _cards_with_fingerprints() -> tuple[dict[str, Card], None, object]:
    from auto_research.experiment.fingerprint import Fingerprints

    cards = discover(code_root())
    return cards, None, Fingerprints(code_root(), cards)


def _graph(options: argparse.Namespace, cards: dict[str, Card], device: str | None, fingerprints=None) -> AuditGraph:
    return AuditGraph(
        cards,
        device or audit_device(options.device, "auto"),
        options.tier,
        options.shards,
        options.shard_index,
        papers_of(options.paper),
        options.include_concept_demos,
        options.only_explicit_device_packages,
        options.dataset,
        fingerprints,
    )


def _existing_rows(graph: AuditGraph) -> list[dict]:
    """The row of each adapter, else its failure record; stale passes do not count."""
    rows = []
    for key in graph.adapters():
        path = next((path for path in (graph.row(key), graph.failure(key)) if path.is_file()), None)
        if path is not None:
            rows.append(records.read_row(path))
    stale = set(stale_rows(graph, rows))
    return [row for row in rows if row["adapter"] not in stale]


def _document(graph: AuditGraph, rows: Sequence[dict], index: int | None) -> dict:
    return records.shard_document(
        rows,
        device=graph.device,
        tier=graph.tier,
        shards=graph.shards,
        index=index,
        expected=graph.adapters(index),
        skipped=graph.selection.skipped,
    )
