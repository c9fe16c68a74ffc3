"""Cards: the facts of an adapter, read from `adapters/<module>/card.yaml` and checked against the schema.

Reading cards imports neither torch nor any adapter.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from auto_research.experiment.layout import CHECKPOINTS, TABLES
from auto_research.runtime.errors import ConfigError, UnknownName
from auto_research.runtime.names import module_name
from auto_research.runtime.schema import validate

TIERS = ("tiny", "smoke", "standard", "full")
_OPTIONAL = {"paper_reported": "", "public_reference": "", "contract": {}, "docs": {}}
_NOT_BUDGET = ("seeds", "headline_seeds", "overrides")


class CardYaml(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """YAML with the two surprises of YAML 1.1 removed: `1e-3` is a number and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


CardYaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> Any:
    """Parse one YAML file. ConfigError (one line, with line number) when it is missing or malformed."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader=CardYaml)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: {getattr(error, 'problem', None) or error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


USUAL_PROTOCOLS = {"ctr": "request table", "next_item": "leave-two-out"}


@dataclass(frozen=True)
class Card:
    """One validated card.

    `facts` is the dict of the file; its parts are attributes too: `card.paper`, `card.data`, `card.gpu`, `card.family` ...
    """

    facts: dict = field(repr=False)
    folder: Path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "facts":
            raise AttributeError(name)
        if name in self.facts:
            return self.facts[name]
        if name in _OPTIONAL:
            return type(_OPTIONAL[name])()
        raise AttributeError(f"a card has no {name!r}")

    @property
    def key(self) -> str:
        return self.facts["key"]

    @property
    def module(self) -> str:
        return module_name(self.key)

    @property
    def title(self) -> str:
        return self.facts["paper"]["title"]

    @property
    def artifacts(self) -> dict[str, dict]:
        return self.facts.get("artifacts", {})

    @property
    def arms(self) -> dict[str, dict]:
        return self.facts["arms"]

    @property
    def floors(self) -> list[str]:
        return [name for name, arm in self.arms.items() if arm["role"] == "floor"]

    @property
    def headline(self) -> list[str]:
        return self.facts.get("headline", [])

    @property
    def comparisons(self) -> list[dict]:
        return self.facts["comparisons"]

    @property
    def primary(self) -> str:
        return self.facts["metrics"]["primary"]

    @property
    def direction(self) -> str:
        return self.facts["metrics"]["direction"]

    def protocol(self, arm: str) -> str:
        """What the arm's numbers are measured on; arms of equal protocol, task and data set can be ranked together."""
        usual = USUAL_PROTOCOLS.get(self.facts["task"], self.facts["task"])
        return self.arms[arm].get("protocol") or self.facts.get("protocol") or usual

    @property
    def metrics(self) -> list[str]:
        """Primary first."""
        return [self.primary, *self.facts["metrics"].get("also", [])]

    @property
    def datasets(self) -> list[str]:
        """Default first."""
        return [self.facts["data"]["default"], *self.facts["data"].get("also", [])]

    def dataset(self, name: str | None = None) -> str:
        """The data set to use; UnknownName when the card does not offer `name`."""
        if name is None:
            return self.datasets[0]
        if name not in self.datasets:
            raise UnknownName(f"adapter {self.key} runs on {', '.join(self.datasets)}, not on {name!r}")
        return name

    def stage(self, kind: str, name: str) -> dict:
        """Facts of one stage. kind: 'artifact' | 'arm'."""
        table = self.artifacts if kind == "artifact" else self.arms
        if name not in table:
            raise UnknownName(f"adapter {self.key} has no {kind} {name!r}; it has {', '.join(table) or 'none'}")
        return table[name]

    def needs(self, kind: str, name: str) -> tuple[list[str], list[str]]:
        """(prepared tables, artifacts) that a stage reads directly."""
        needs = self.stage(kind, name)["needs"]
        return [n for n in needs if n not in self.artifacts], [n for n in needs if n in self.artifacts]

    def artifact_order(self, arms: Iterable[str] | None = None) -> list[str]:
        """Artifacts below `arms` (default: all artifacts), each after those it needs."""
        order: list[str] = []

        def visit(name: str) -> None:
            if name not in order:
                for below in self.needs("artifact", name)[1]:
                    visit(below)
                order.append(name)

        wanted = self.artifacts if arms is None else [n for arm in arms for n in self.needs("arm", arm)[1]]
        for name in wanted:
            visit(name)
        return order

    def _tier(self, tier: str) -> dict:
        if tier not in self.facts["budgets"]:
            raise UnknownName(f"unknown tier {tier!r}; choose one of {', '.join(TIERS)}")
        return self.facts["budgets"][tier]

    def budget(self, tier: str, stage: str | None = None) -> dict:
        """Free keys of a tier with the overrides of `stage` applied; seeds are not part of it."""
        facts = self._tier(tier)
        budget = {key: value for key, value in facts.items() if key not in _NOT_BUDGET}
        budget.update(facts.get("overrides", {}).get(stage, {}) if stage else {})
        return copy.deepcopy(budget)

    def tuning_seed(self, tier: str) -> int:
        """The seed on which hyperparameters are chosen: the first of the tier."""
        return self._tier(tier)["seeds"][0]

    def tuned(self, tier: str, arm: str, seed: int) -> bool:
        """Whether this arm and seed takes the tuning seed's choice instead of choosing itself."""
        return seed != self.tuning_seed(tier) and len(self.budget(tier, arm).get("trials", [])) > 1

    def seeds(self, tier: str, arm: str, override: Iterable[int] | None = None) -> list[int]:
        """Seeds of an arm; `override` replaces the card's for all arms alike."""
        if override:
            return list(override)
        facts = self._tier(tier)
        return list(facts.get("headline_seeds", facts["seeds"]) if arm in self.headline else facts["seeds"])

    def read_by(self, kind: str, name: str, tier: str) -> dict:
        """The parts of the card that a stage can see; a change anywhere else reruns nothing."""
        facts = self.stage(kind, name)
        return {
            "key": self.key,
            "needs": facts["needs"],
            "switch": facts.get("switch"),
            "budget": self.budget(tier, name),
            "tuning_seed": self.tuning_seed(tier),
        }

    def read_by_compare(self) -> dict:
        """The parts of the card that result.json and report.md show."""
        parts = (
            "key",
            "paper",
            "fidelity",
            "task",
            "protocol",
            "problem",
            "boundary",
            "paper_reported",
            "metrics",
            "comparisons",
        )
        return {name: self.facts.get(name) for name in parts} | {"arms": self.arms}


def load_card(folder: Path) -> Card:
    """Read and check the card of one adapter folder.

    Raises ConfigError (one line naming file and field) on a malformed card, an unknown field, a stage that needs something
    undeclared, a cycle of artifacts, or a key that does not fit the folder.
    """
    folder = Path(folder)
    path = folder / "card.yaml"
    facts = read_yaml(path)
    try:
        validate(facts, "card")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    card = Card(facts, folder)
    problem = _inconsistency(card)
    if problem:
        raise ConfigError(f"{path}: {problem}")
    return card


def discover(root: Path) -> dict[str, Card]:
    """All cards below `root/adapters`, by key, in alphabetical order.

    A folder counts when it holds card.yaml. ConfigError when it has no `__init__.py`: the import graph would not see it,
    so that edits would rerun nothing.
    """
    cards = {}
    for path in sorted((Path(root) / "adapters").glob("*/card.yaml")):
        if not (path.parent / "__init__.py").is_file():
            raise ConfigError(f"{path.parent}: has a card but no __init__.py; add an empty one")
        card = load_card(path.parent)
        cards[card.key] = card
    return cards


def find_card(root: Path, key: str) -> Card:
    """The card of one adapter by key ('-' or '_'). UnknownName lists the keys that exist."""
    wanted = key.replace("-", "_")
    folder = Path(root) / "adapters" / wanted
    if re.fullmatch(r"[a-z0-9][a-z0-9_]*", wanted) and (folder / "card.yaml").is_file():
        return load_card(folder)
    known = sorted(p.parent.name.replace("_", "-") for p in (Path(root) / "adapters").glob("*/card.yaml"))
    raise UnknownName(f"unknown adapter {key!r}; known: {', '.join(known) or 'none'}")


def _inconsistency(card: Card) -> str:
    if card.folder.name != card.module:
        return f"key {card.key!r} belongs into a folder named {card.module!r}"
    twice = set(card.artifacts) & set(card.arms) | set(card.artifacts) & {*TABLES, *CHECKPOINTS}
    if twice:
        return f"{sorted(twice)[0]!r} names two things"
    tables = set(card.facts["data"]["needs"])
    for name, stage in [*card.artifacts.items(), *card.arms.items()]:
        unknown = [need for need in stage["needs"] if need not in card.artifacts and need not in tables]
        if unknown:
            return f"{name}.needs: {unknown[0]!r} is neither in data.needs nor an artifact of this card"
    mentioned = [("headline", card.headline)]
    mentioned += [("comparisons", [c["arm"] for c in card.comparisons] + [c["against"] for c in card.comparisons])]
    for where, arms in mentioned:
        unknown = [arm for arm in arms if arm not in card.arms]
        if unknown:
            return f"{where}: {unknown[0]!r} is not an arm"
    stages = set(card.arms) | set(card.artifacts)
    for tier, budget in card.facts["budgets"].items():
        unknown = [name for name in budget.get("overrides", {}) if name not in stages]
        if unknown:
            return f"budgets.{tier}.overrides: {unknown[0]!r} is no stage"
        if budget.get("headline_seeds", budget["seeds"])[0] != budget["seeds"][0]:
            return f"budgets.{tier}: headline_seeds must begin with the tuning seed {budget['seeds'][0]}"
    return _cycle(card)


def _cycle(card: Card) -> str:
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> str:
        if name in above:
            return f"artifacts need each other in a circle: {' -> '.join([*above, name])}"
        if name in done:
            return ""
        found = next((p for n in card.needs("artifact", name)[1] if (p := visit(n, (*above, name)))), "")
        done.add(name)
        return found

    return next((problem for name in card.artifacts if (problem := visit(name, ()))), "")
