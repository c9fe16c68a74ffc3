"""Stages of the toy: a loop that saves its state every step and can be held by a file, or made to fail."""

import json
import os
import time
from pathlib import Path

from adapters.toy.model import grow
from auto_research.experiment.contract import Experiment, Measurement, Units
from auto_research.runtime.errors import NonFinite

experiment = Experiment("toy")


@experiment.artifact
def table(ctx):
    (ctx.out / "table.json").write_text(json.dumps([1, 2, ctx.seed]))


@experiment.arm
def popularity(ctx):
    return measured(ctx, 0.1)


@experiment.arm
def slow(ctx):
    width = len(json.loads((ctx.artifact("table") / "table.json").read_text()))
    return measured(ctx, train(ctx, width))


@experiment.arm
def plain(ctx):
    return measured(ctx, train(ctx, ctx.switch["width"]))


def train(ctx, width):
    """Sum of steps; every started step is appended to trace-<arm>.txt of the folder named by TOY_DIR, if any."""
    folder = Path(os.environ["TOY_DIR"]) if "TOY_DIR" in os.environ else None
    rate = (ctx.tuned or {"learning_rate": 0.001})["learning_rate"] * width
    state = ctx.state.load() or {"step": 0, "value": 0.0}
    while state["step"] < ctx.budget.steps:
        if folder is not None:
            meet(ctx, folder, state["step"])
        state = {"step": state["step"] + 1, "value": grow(state["value"], state["step"], rate)}
        ctx.state.save(state)
        ctx.progress(state["step"], ctx.budget.steps, value=state["value"])
    return 0.2 + state["value"]


def meet(ctx, folder, step):
    """Leave a trace of this step, fail where fail-<arm> asks for it, wait while hold-<arm>-<step> exists."""
    if (folder / f"fail-{ctx.stage}").exists():
        raise NonFinite(f"arm {ctx.stage}: loss became nan at step {step}")
    with open(folder / f"trace-{ctx.stage}.txt", "a") as trace:
        trace.write(f"{step}\n")
    while (folder / f"hold-{ctx.stage}-{step}").exists():
        time.sleep(0.05)


def measured(ctx, level):
    """A measurement whose contributions spread around `level`."""
    users = list(range(1, ctx.budget.users + 1))
    values = [level + 0.001 * ((user * 7 + ctx.seed) % 5 - 2) for user in users]
    mean = sum(values) / len(values)
    chosen = dict(ctx.tuned or ctx.budget.get("trials", [{"learning_rate": 0.001}])[-1])
    return Measurement(
        metrics={"ndcg@10": mean, "hit@10": 2 * mean},
        validation={"ndcg@10": mean},
        units={"ndcg@10": Units("user", users, values)},
        cost={"params": 1, "flops": 2},
        curve=[{"step": step, "loss": 1.0 / (step + 1), "validation": level} for step in range(3)],
        hyperparameters=chosen,
    )
