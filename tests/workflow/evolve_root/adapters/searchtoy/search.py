"""A host that trains in milliseconds and fails on request; the folder TOY_DIR steers it."""

import json
import os
import time
from pathlib import Path

from auto_research.experiment.search import Evaluation, SearchHost, refuse_sealed
from auto_research.runtime.files import write_json

STEPS = 6
MEET = Path(os.environ.get("TOY_DIR", "/nonexistent"))

host = SearchHost("searchtoy")


@host.register
def prepare(config, source, dev, sealed):
    write_json(dev / "rows.json", [0.1, 0.2, 0.3, 0.4])
    write_json(sealed / "rows.json", [0.2, 0.3, 0.4, 0.6])


def note(name, text):
    if MEET.is_dir():
        with (MEET / name).open("a") as handle:
            handle.write(f"{text}\n")


def train(request):
    """A running sum over STEPS steps, saved after each; planted behaviours of the gene `fault`."""
    request.state.mkdir(parents=True, exist_ok=True)
    saved = request.state / "state.json"
    state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "weight": 0.0}
    genome = request.genome
    while state["step"] < STEPS:
        note("trace.txt", f"{genome['block']}-{genome['width']} {state['step']} {request.accumulate}")
        while (MEET / f"hold-{genome['block']}-{state['step']}").exists():
            time.sleep(0.02)
        fault(genome["fault"], state["step"], request.accumulate)
        state["weight"] += (state["step"] + request.seed % 7) * genome["width"] / 1e4
        state["step"] += 1
        write_json(saved, state)
        request.progress(state["step"], STEPS, loss=1.0 / state["step"])
    return state["weight"]


def fault(kind, step, accumulate):
    if step != 2 or kind == "none":
        return
    if kind == "raise":
        raise ValueError("planted <b>failure</b> & an unbreakably_long_name_" + "x" * 120)
    if kind == "oom" and accumulate == 1:
        raise MemoryError
    if kind == "sleep":
        time.sleep(600)
    if kind == "exit":
        os._exit(7)


def measure(request, rows, weight):
    gain = {"plain": 0.0, "mix": 0.05, "deep": 0.02}[request.genome["block"]]
    values = [row + gain + weight for row in rows]
    fitness = sum(values) / len(values)
    if request.genome["fault"] == "nan":
        fitness = float("nan")
    return Evaluation(
        fitness=fitness,
        metrics={"score": fitness, "head_share@10": 0.5 - gain, "tail.score": None},
        units={"kind": "user", "ids": list(range(len(rows))), "values": values},
        parameters=request.genome["width"] * 10,
        flops=float(request.genome["width"]),
        micro_batch=8 // request.accumulate,
        curve=[{"step": step, "loss": 1.0 / step} for step in range(1, STEPS + 1)],
    )


@host.register
def trial(request):
    rows = json.loads((refuse_sealed(request.dev) / "rows.json").read_text())
    return measure(request, rows, train(request))


@host.register
def test(request, unseal):
    weight = train(request)
    return measure(request, json.loads((unseal() / "rows.json").read_text()), weight)


@host.register
def floors(config, dev, unseal):
    mean = {part: sum(rows) / len(rows) for part, rows in parts(dev, unseal()).items()}
    return {"mean": {part: {"fitness": value} for part, value in mean.items()}}


def parts(dev, sealed):
    return {
        "validation": json.loads((dev / "rows.json").read_text()),
        "test": json.loads((sealed / "rows.json").read_text()),
    }
