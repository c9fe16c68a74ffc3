"""Receipts: committed, de-identified records of audit rows that passed on an accepted accelerator.

A receipt is made from a row and from nothing else; there is no way to write one from a CPU, MPS or shadow run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from auto_research.audit import privacy
from auto_research.audit.devices import kind_of
from auto_research.audit.rows import is_pass
from auto_research.audit.runner import source_commit, source_hash
from auto_research.experiment.card import Card, discover
from auto_research.runtime.errors import AutoResearchError, ConfigError
from auto_research.runtime.files import read_json, write_json
from auto_research.runtime.paths import config_dir
from auto_research.runtime.schema import load_yaml, validate

PENDING = "pending"
FOLDER = Path("docs") / "gpu-validations"


class NoReceipt(AutoResearchError):
    """A row that cannot become a receipt, and why."""


def accelerators() -> dict[str, str]:
    """Accepted accelerators of config/accelerators.yaml: name -> word in the model text."""
    return dict(load_yaml(config_dir() / "accelerators.yaml"))


def accelerator_of(model: str | None) -> str | None:
    """Accepted name of a model text: 'NVIDIA A100-SXM4-40GB' -> 'A100'. None when it is not accepted."""
    for name, word in accelerators().items():
        if model and re.search(rf"(?<![A-Za-z0-9]){re.escape(str(word))}(?![A-Za-z0-9])", model):
            return name
    return None


def receipt_of(row: Mapping[str, Any], card: Card, *, date: str, commit: str | None) -> dict[str, Any]:
    """The receipt of one row. Raises NoReceipt when the row earns none, ConfigError when the receipt would be invalid.

    date: day of the run.  commit: the commit whose sources made the row.
    """
    validate(row, "audit_row")
    if kind_of(row["device"]) != "cuda" or row["status"] != "gpu_pass" or not is_pass(row):
        raise NoReceipt(f"status {row['status']} on {row['device']} is no pass on a GPU")
    model = row["runtime"]["accelerator"]
    name = accelerator_of(model)
    if name is None:
        raise NoReceipt(f"accelerator {model!r} is not in config/accelerators.yaml")
    if commit is None:
        raise NoReceipt("the sources of the run are not those of a commit")
    command = f"python scripts/audit_gpu_paths.py --paper {card.key} --device {row['device']} --tier {row['tier']}"
    receipt = {
        "schema_version": 1,
        "adapter": card.key,
        "accelerator": name,
        "date": date,
        "status": row["status"],
        "checkpoint_revision": None,
        "command": f"{command} --dataset-dir data --timeout-seconds {row['timeout_seconds']:g}",
        "metrics": {
            arm: {metric: value for metric, value in metrics.items() if metric in card.metrics}
            for arm, metrics in row["metrics"].items()
        },
        "torch": str(row["runtime"]["torch"]).split("+")[0],
        "commit": commit,
        **{key: row[key] for key in ("tier", "dataset", "seed", "seconds", "calls", "peak_memory_bytes", "sources")},
    }
    check_receipt(receipt, {card.key: card}, words=privacy.machine_words())
    return receipt


def check_receipt(receipt: Any, cards: Mapping[str, Card], words: set[str] = frozenset()) -> None:
    """Raise ConfigError unless `receipt` fits its schema, names an accepted accelerator, a known adapter with that
    adapter's arms, metrics and data set, and holds nothing private."""
    validate(receipt, "receipt")
    if found := privacy.problems(receipt, words):
        raise ConfigError(f"receipt is not de-identified: {found[0]}")
    if receipt["accelerator"] not in accelerators():
        raise ConfigError(f"accelerator {receipt['accelerator']} is not in config/accelerators.yaml")
    card = cards.get(receipt["adapter"])
    if card is None:
        raise ConfigError(f"no adapter {receipt['adapter']!r}")
    if receipt["dataset"] not in card.datasets:
        raise ConfigError(f"adapter {card.key} does not run on {receipt['dataset']!r}")
    if f" --paper {card.key} " not in receipt["command"]:
        raise ConfigError(f"the command is not one of adapter {card.key}")
    for arm, metrics in receipt["metrics"].items():
        unknown = [arm] if arm not in card.arms else sorted(set(metrics) - set(card.metrics))
        if unknown:
            raise ConfigError(f"adapter {card.key} has no arm or metric {unknown[0]!r}")


def file_name(receipt: Mapping[str, Any]) -> str:
    """`<key>-<accelerator>-<date>.json`."""
    return f"{receipt['adapter']}-{receipt['accelerator'].lower()}-{receipt['date'].replace('-', '')}.json"


def write_receipts(root: Path, paths: Sequence[Path], out: Path, date: str) -> tuple[list[Path], dict[str, str]]:
    """Receipts for the GPU passes in row or shard files; returns the files written and why other rows got none.

    A row whose sources differ from the checkout's, or a checkout with uncommitted changes, gets no receipt.
    """
    cards = discover(root)
    head = source_commit(root)
    written, refused = [], {}
    for path in paths:
        content = read_json(path)
        for row in content.get("rows", [content]):
            card = cards.get(row["adapter"])
            if card is None:
                refused[row["adapter"]] = "no such adapter in this checkout"
                continue
            try:
                same = row["sources"] == source_hash(root, card)
                receipt = receipt_of(row, card, date=date, commit=head if same else None)
            except (NoReceipt, ConfigError) as error:
                refused[card.key] = str(error)
                continue
            write_json(out / file_name(receipt), receipt)
            written.append(out / file_name(receipt))
    return written, refused


def validation_states(cards: Mapping[str, Card]) -> dict[str, str]:
    """For every card that requires a GPU validation: `pending` or the receipt's file name."""
    states = {}
    for key, card in sorted(cards.items()):
        if card.facts["gpu"].get("requires_validation"):
            states[key] = card.facts["gpu"].get("validation") or ""
    return states


def evidence_problems(cards: Mapping[str, Card], folder: Path) -> list[str]:
    """What is wrong with the committed evidence: cards without a receipt or `pending`, receipts that are not valid."""
    found = []
    valid: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            receipt = read_json(path)
            check_receipt(receipt, cards)
            if path.name != file_name(receipt):
                raise ConfigError(f"the file must be named {file_name(receipt)}")
            valid[path.name] = receipt["adapter"]
        except AutoResearchError as error:
            found.append(f"{path.name}: {error}")
    for key, state in validation_states(cards).items():
        if state == PENDING:
            continue
        if not state:
            found.append(f"{key}: requires a GPU validation, but its card names neither a receipt nor `pending`")
        elif valid.get(state) != key:
            found.append(f"{key}: its card names {state}, which is no valid receipt of it in {FOLDER}")
    return found
