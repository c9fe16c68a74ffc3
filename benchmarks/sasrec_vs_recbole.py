"""Seconds until SASRec reaches a validation ndcg@10, here and in RecBole 1.2.1, one thread each.

    python benchmarks/sasrec_vs_recbole.py --data results/data/movielens-100k/sequences --recbole-python VENV/bin/python

Both sides train on the same sequences (canonical order made unique for RecBole by numbering a user's events), with the
same embedding size, layers, heads, dropout and 64 events, and are validated by the same code over the full catalogue
without the user's history. RecBole keeps its own defaults for batch size, learning rate and prefix augmentation.
Counted are training and validation; loading is not. RecBole lives in its own environment:

    python -m venv VENV
    VENV/bin/pip install "setuptools<80" torch==<this torch> numpy pandas scipy scikit-learn tqdm colorlog colorama \
        pyyaml tabulate texttable plotly psutil tensorboard
    VENV/bin/pip install --no-deps recbole==1.2.1 thop

Both sides are workers of this script (`--worker`), run one after the other. Prints a table and writes JSON (`--out`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TARGETS = (0.05, 0.10)
WIDTH, LAYERS, HEADS, DROPOUT, LENGTH = 64, 2, 2, 0.3, 64
SIDES = ("here", "recbole")


class Watch:
    """Wall and CPU seconds until each target, from one validation after another."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        self.reached: dict[str, dict] = {}
        self.curve: list[dict] = []

    def see(self, ndcg: float, epoch: int) -> bool:
        """Note a validation; True when every target has been reached."""
        now = {
            "wall_seconds": round(time.perf_counter() - self.wall, 2),
            "cpu_seconds": round(time.process_time() - self.cpu, 2),
            "epoch": epoch,
        }
        self.curve.append(now | {"ndcg@10": round(ndcg, 5)})
        print(self.curve[-1], file=sys.stderr, flush=True)
        for target in TARGETS:
            if ndcg >= target:
                self.reached.setdefault(str(target), now)
        return len(self.reached) == len(TARGETS)


def ndcg_at_10(scores: np.ndarray, targets: np.ndarray, histories: list[np.ndarray]) -> float:
    """Mean ndcg@10, histories excluded, ties against the target; scores [U, items + 1], column 0 is padding."""
    scores = scores.copy()
    scores[:, 0] = -np.inf
    for row, history in enumerate(histories):
        scores[row, history] = -np.inf
    rank = (scores >= scores[np.arange(len(targets)), targets][:, None]).sum(1)
    return float(np.where(rank <= 10, 1 / np.log2(1 + rank), 0.0).mean())


def load(folder: Path) -> dict:
    """Sequences of the exchange folder: histories (train items), valid and test targets, number of items."""
    arrays = np.load(folder / "sequences.npz")
    return {
        "train": np.split(arrays["items"], arrays["starts"][1:-1]),
        "valid": arrays["valid"],
        "test": arrays["test"],
        "n_items": int(arrays["n_items"]),
    }


def worker_here(folder: Path, limit: float) -> dict:
    """Train with auto_research until every target is reached or `limit` seconds have passed."""
    import torch

    from auto_research.baselines.sasrec import RECIPE, SASRec
    from auto_research.blocks.causal_transformer import TransformerConfig
    from auto_research.data.sequences import LeaveTwoOut
    from auto_research.runtime.seeds import seed_everything
    from auto_research.train.loop import Plan, fit
    from auto_research.train.next_item import EpochWindows, NextItemBudget, model_scorer, next_item_loss
    from auto_research.train.optimizer import adamw, warmup_cosine
    from auto_research.train.state import StateFolder

    data, device = load(folder), torch.device("cpu")
    starts = np.concatenate([[0], np.cumsum([len(items) for items in data["train"]])])
    users = np.arange(1, len(starts))
    sequences = LeaveTwoOut(
        len(users),
        data["n_items"],
        users,
        np.concatenate(data["train"]),
        starts,
        data["valid"],
        data["test"],
        "benchmark",
    )
    seed_everything(42)
    model = SASRec(data["n_items"], LENGTH, TransformerConfig(WIDTH, HEADS, LAYERS, dropout=DROPOUT))
    budget, trial = NextItemBudget.of(RECIPE), RECIPE["trials"][0]
    score = model_scorer(model, sequences, LENGTH, device)
    watch = Watch()

    class Enough(Exception):
        pass

    def validate(_) -> dict[str, float]:
        everyone = np.arange(len(users))
        ndcg = ndcg_at_10(score("valid", everyone), data["valid"], data["train"])
        if watch.see(ndcg, len(watch.curve) + 1) or watch.curve[-1]["wall_seconds"] > limit:
            raise Enough
        return {"ndcg@10": ndcg}

    with contextlib.suppress(Enough):
        fit(
            model,
            adamw(model, trial["learning_rate"], trial["weight_decay"], betas=(0.9, 0.98)),
            Plan(budget.epochs, clip=budget.clip, key="ndcg@10"),
            batches=lambda epoch: EpochWindows(sequences, budget, 42, epoch, device),
            loss=next_item_loss,
            validate=validate,
            state=StateFolder(folder / "state"),
            schedule=warmup_cosine(budget.warmup),
        )
    return {"reached": watch.reached, "curve": watch.curve}


def worker_recbole(folder: Path, limit: float) -> dict:
    """Train RecBole's SASRec likewise. Runs in RecBole's environment, without auto_research."""
    removed = {"float": float, "int": int, "bool": bool, "object": object, "long": int, "unicode_": np.str_}
    removed |= {"float_": np.float64, "complex_": np.complex128, "string_": np.bytes_, "Inf": np.inf}
    for name, value in removed.items():  # aliases that numpy 2 dropped and RecBole 1.2.1 imports
        if name not in np.__dict__:
            setattr(np, name, value)
    import torch
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.data.interaction import Interaction
    from recbole.model.sequential_recommender import SASRec
    from recbole.utils import get_trainer, init_seed

    torch.set_num_threads(1)
    settings = {
        "data_path": str(folder),
        "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
        "checkpoint_dir": str(folder / "recbole"),
        "seed": 42,
        "use_gpu": False,
        "show_progress": False,
        "MAX_ITEM_LIST_LENGTH": LENGTH,
        "hidden_size": WIDTH,
        "inner_size": 4 * WIDTH,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "hidden_dropout_prob": DROPOUT,
        "attn_dropout_prob": DROPOUT,
        "loss_type": "CE",
        "train_neg_sample_args": None,
        "eval_args": {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full", "group_by": "user"},
    }
    config = Config(model="SASRec", dataset="sequences", config_dict=settings)
    init_seed(42, True)
    dataset = create_dataset(config)
    train_data, _, _ = data_preparation(config, dataset)
    model = SASRec(config, train_data.dataset)
    trainer = get_trainer(config["MODEL_TYPE"], config["model"])(config, model)
    data = load(folder)
    own = np.zeros(data["n_items"] + 1, dtype=np.int64)  # our item id -> RecBole's
    known = dataset.field2token_id["item_id"]
    for item in range(1, len(own)):
        own[item] = known.get(str(item), 0)
    window = torch.zeros(len(data["train"]), LENGTH, dtype=torch.int64)
    length = torch.zeros(len(data["train"]), dtype=torch.int64)
    for row, history in enumerate(data["train"]):
        recent = own[history[-LENGTH:]]
        window[row, : len(recent)], length[row] = torch.from_numpy(recent), len(recent)
    recent = Interaction({model.ITEM_SEQ: window, model.ITEM_SEQ_LEN: length})
    watch, epoch = Watch(), 0
    while True:
        trainer._train_epoch(train_data, epoch)
        epoch += 1
        model.eval()
        with torch.no_grad():
            scores = model.full_sort_predict(recent).numpy()[:, own]
        if watch.see(ndcg_at_10(scores, data["valid"], data["train"]), epoch):
            break
        if watch.curve[-1]["wall_seconds"] > limit:
            break
    return {"reached": watch.reached, "curve": watch.curve}


def exchange(source: Path, folder: Path) -> None:
    """Write the prepared sequences as arrays and as RecBole's atomic file with timestamps 1, 2, 3 ... per user."""
    from auto_research.data.sequences import LeaveTwoOut

    data = LeaveTwoOut.load(source)
    np.savez(
        folder / "sequences.npz",
        items=data.train_items,
        starts=data.train_starts,
        valid=data.valid_target,
        test=data.test_target,
        n_items=data.n_items,
    )
    (folder / "sequences").mkdir()
    with open(folder / "sequences" / "sequences.inter", "w") as handle:
        handle.write("user_id:token\titem_id:token\ttimestamp:float\n")
        for position, user in enumerate(data.users):
            events = [*data.train[position], data.valid_target[position], data.test_target[position]]
            handle.writelines(f"{user}\t{item}\t{time}\n" for time, item in enumerate(events, 1))


def table(results: dict[str, dict]) -> str:
    """Markdown table of the sides that ran."""
    lines = ["| validation ndcg@10 | side | wall s | CPU s | epoch |", "|---|---|---|---|---|"]
    for target in map(str, TARGETS):
        for side, result in results.items():
            at = result["reached"].get(target)
            last = result["curve"][-1]
            shown = at or {name: f"> {last[name]}" for name in ("wall_seconds", "cpu_seconds", "epoch")}
            lines.append(f"| {target} | {side} | {shown['wall_seconds']} | {shown['cpu_seconds']} | {shown['epoch']} |")
    for target, ratio in ratios(results).items():
        lines.append(f"\nratio of CPU seconds at {target}: {ratio}")
    return "\n".join(lines)


def ratios(results: dict[str, dict]) -> dict[str, str]:
    """RecBole's CPU seconds over ours per target; a lower bound where RecBole was stopped first."""
    found = {}
    for target in map(str, TARGETS):
        here = results.get("here", {}).get("reached", {}).get(target)
        if here is None or "recbole" not in results:
            continue
        there = results["recbole"]["reached"].get(target)
        seconds = (there or results["recbole"]["curve"][-1])["cpu_seconds"]
        found[target] = ("" if there else "> ") + f"{seconds / here['cpu_seconds']:.1f}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="prepared `sequences` folder")
    parser.add_argument(
        "--recbole-python", type=Path, help="interpreter of RecBole's environment; without it only ours"
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--limit", type=float, default=3600.0, help="wall seconds after which a side is stopped")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/sasrec_vs_recbole.json"))
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run = worker_here if options.worker == "here" else worker_recbole
        (options.folder / f"{options.worker}.json").write_text(json.dumps(run(options.folder, options.limit)))
        return
    if options.data is None:
        parser.error("--data is needed: the prepared `sequences` folder")
    interpreters = {"here": sys.executable, "recbole": options.recbole_python and options.recbole_python.absolute()}
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "AUTO_RESEARCH_CPU_THREADS": "1"}
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exchange(options.data, folder)
        for side, interpreter in interpreters.items():
            if interpreter is None or side not in options.sides:
                continue
            command = [str(interpreter), str(Path(__file__).resolve()), "--worker", side]
            command += ["--folder", str(folder), "--limit", str(options.limit)]
            subprocess.run(command, check=True, env=one_thread, cwd=folder)
            results[side] = json.loads((folder / f"{side}.json").read_text())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps({"sides": results, "cpu_ratio": ratios(results)}, indent=1, sort_keys=True) + "\n"
    )
    print(table(results))


if __name__ == "__main__":
    main()
