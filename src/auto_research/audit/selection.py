"""Which adapters are audited, and which shard runs them. Derived from cards and syntax trees; no list is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from auto_research.audit.scan import has_device_path
from auto_research.experiment.card import Card
from auto_research.runtime.errors import ConfigError, UnknownName
from auto_research.runtime.names import key_name


@dataclass(frozen=True)
class Selection:
    """Keys to audit in alphabetical order, and why every other adapter is left out."""

    chosen: tuple[str, ...]
    skipped: dict[str, str]


def select(
    cards: Mapping[str, Card],
    *,
    papers: Sequence[str] = (),
    include_concept_demos: bool = False,
    only_explicit: bool = False,
) -> Selection:
    """Choose adapters among `cards`.

    An adapter is audited when its card says `gpu.path: true` or its own folder reaches for a device.
    only_explicit: the folder must do so, whatever the card says.  papers: exactly these, whatever their fidelity.
    Raises UnknownName for a paper without a card.
    """
    wanted = {key_name(name.replace("-", "_")) for name in papers if name != "all"}
    if unknown := sorted(wanted - cards.keys()):
        raise UnknownName(f"unknown adapter '{unknown[0]}'; known: {', '.join(sorted(cards)) or 'none'}")
    chosen, skipped = [], {}
    for key in sorted(cards):
        card = cards[key]
        reason = None
        if wanted:
            reason = None if key in wanted else "not among the papers asked for"
        elif card.facts["fidelity"] == "concept_demo" and not include_concept_demos:
            reason = "concept demo"
        elif not has_device_path(card.folder) and (only_explicit or not card.facts["gpu"]["path"]):
            reason = "no device path in its own folder"
        if reason is None:
            chosen.append(key)
        else:
            skipped[key] = reason
    return Selection(tuple(chosen), skipped)


def shard(keys: Sequence[str], shards: int, index: int | None) -> tuple[str, ...]:
    """The keys of one shard: every `shards`-th of the sorted keys. All keys when `index` is None.

    For every key exactly one index of range(shards) holds it. Raises ConfigError on a bad count or index.
    """
    if shards < 1 or (index is not None and not 0 <= index < shards):
        raise ConfigError(f"shard {index} of {shards} does not exist: use 0 <= shard index < shards")
    ordered = tuple(sorted(keys))
    return ordered if index is None else ordered[index::shards]
