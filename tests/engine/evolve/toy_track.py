"""A toy track with an instant evaluator, and a driver that passes documents from step to step like the workflow does."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, field

from auto_research.evolve.propose import propose
from auto_research.evolve.request import frozen_text
from auto_research.evolve.select import select
from auto_research.runtime.files import canonical_json
from auto_research.runtime.schema import validate

DEFINITION = {
    "key": "toy",
    "track": "toy",
    "host": "toy",
    "title": "Toy",
    "question": "Which?",
    "fitness": {"name": "f", "what": "f", "unit": "user"},
    "genome": [
        {"name": "block", "type": "structural", "allowed": ["plain", "mix", "deep"], "default": "plain", "generations": [1, 2, ">3"]},
        {
            "name": "channel",
            "type": "structural",
            "allowed": ["ffn", "moe"],
            "default": "ffn",
            "generations": [1, 2, ">3"],
            "active_when": [{"block": ["plain", "mix"]}],
        },
        {"name": "width", "type": "int", "allowed": [8, 16, 32], "default": 8, "generations": [3, ">3"]},
        {"name": "rate", "type": "float", "allowed": [0.1, 0.01, 0.001], "default": 0.01, "generations": [3, ">3"]},
        {
            "name": "experts",
            "type": "int",
            "allowed": [2, 4],
            "default": 2,
            "generations": [3, ">3"],
            "active_when": [{"channel": ["moe"]}],
        },
    ],
    "operators": [
        {"name": "mixing", "gene": "block", "values": ["mix"], "paper": "p1"},
        {"name": "mixture", "gene": "channel", "values": ["moe"], "paper": "p2", "keywords": ["sparse", "稀疏"]},
    ],
    "generations": [
        {"when": 1, "slots": [{"genes": "structural", "changes": 1}]},
        {"when": 2, "slots": [{"genes": "structural", "changes": 1}], "front": "upper-half"},
        {"when": 3, "slots": [{"genes": "hyper", "changes": 1}]},
        {"when": "later", "slots": [{"genes": "structural", "changes": 1}, {"genes": "hyper", "changes": 2}]},
    ],
    "guards": [{"metric": "parameters", "at_most": 100.0}],
}  # fmt: skip


def make_config(**changes) -> dict:
    config = {
        "schema_version": 1, "track": "toy", "run": "t", "dataset": "none", "direction": "", "profile": "quick", "seeds": [1],
        "run_seed": 1, "population": 2, "steps": None, "evaluation_users": None, "z": 1.0, "min_improvement": 0.0,
        "promotion_min_seeds": 1, "host": {}, "definition": copy.deepcopy(DEFINITION),
    }  # fmt: skip
    definition = changes.pop("definition", {})
    config.update(changes)
    config["definition"].update(definition)
    return config


def value_of(genome: dict) -> float:
    """Fitness of the toy: structure and width help, a rate of 0.1 hurts."""
    gain = {"plain": 0.0, "mix": 0.02, "deep": -0.01}[genome["block"]] + (0.03 if genome["channel"] == "moe" else 0.0)
    return 0.5 + gain + genome["width"] / 1000 - (genome["rate"] == 0.1) * 0.05 + genome["experts"] / 10000


def block_of(
    record: dict, *, status="completed", fitness=None, units=None, parameters=None, flops=1.0, **extra
) -> dict:
    """Deterministic trial block of a candidate record."""
    genome = record["genome"]
    fitness = value_of(genome) if fitness is None else fitness
    units = [fitness - 0.01, fitness, fitness + 0.01] if units is None else units
    seed = {
        "seed": 1, "fitness": fitness, "metrics": {"f": fitness}, "units": {"kind": "user", "ids": [1, 2, 3], "values": units},
        "replicates": [], "spent": {}, "contributions": {}, "curve": [], "notes": [],
    }  # fmt: skip
    done = status == "completed"
    return {
        "trial_id": record["trial_id"],
        "genome": genome,
        "raw_fingerprint": record["raw_fingerprint"],
        "effective_fingerprint": record["effective_fingerprint"],
        "fingerprints": {},
        "legality": "legal",
        "status": status,
        "error": None if done else {"class": "Planted"},
        "per_seed": [seed] if done else [],
        "parameters": (parameters or genome["width"]) if done else None,
        "flops": flops if done else None,
        "micro_batch": None,
        **extra,
    }


@dataclass
class Toy:
    """Documents of a run by generation; ``trial(record) -> deterministic block``."""

    config: dict
    trial: object = block_of
    order: object = None
    candidates: list[dict] = field(default_factory=list)
    selections: list[dict] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)

    def run(self, generations: int) -> Toy:
        """Go on to ``generations``; every decision sees files only (documents pass through JSON text)."""
        while len(self.selections) <= generations:
            self.step()
        return self

    def step(self) -> None:
        g = len(self.selections)
        previous = json.loads(canonical_json(self.selections[-1])) if g else None
        document = json.loads(canonical_json(propose(json.loads(canonical_json(self.config)), g, previous)))
        blocks = [self.trial(record) for record in document["candidates"] if record["status"] == "run"]
        self.trained += [block["trial_id"] for block in blocks]
        if self.order is not None:
            random.Random(self.order).shuffle(blocks)
        self.candidates.append(validate(document, "candidates"))
        text = frozen_text(self.config).encode()
        selection = select(self.config, text, document, canonical_json(document).encode(), blocks, previous)
        self.selections.append(validate(selection, "selection"))

    @property
    def champion(self) -> dict:
        return self.selections[-1]["deterministic"]["champion"]

    def texts(self) -> list[str]:
        return [canonical_json(document) for document in self.candidates]

    def records(self) -> list[dict]:
        return [record for document in self.candidates for record in document["candidates"]]
