"""DIN and DCN-V2 here and in FuxiCTR 2.3.10 on the same rated rows of the request table, one thread each.

    python benchmarks/ctr_vs_fuxictr.py --data results/data/movielens-100k/requests --fuxictr-python VENV/bin/python

Both sides see the same fields, statistics and last 20 events, 16 numbers a field, the label `like` alone (no negatives, no
other heads), about 540 rows a step, AdamW with weight decay 1e-4, learning rates 5e-4 and 1e-3, dropout 0.2, at most 8
epochs with patience 2 on validation AUC; the trial with the better validation AUC is measured on the test rows. Layers
have the same widths. FuxiCTR keeps its own initialisation, its learning-rate cuts on a plateau and its mean over the
events in DCN-V2, where the baseline here has target attention beside means; its models come from the `model_zoo` of
its package. It lives in its own environment:

    python -m venv VENV
    VENV/bin/pip install torch==<this torch> numpy pandas polars pyarrow pydantic pyyaml h5py ray scikit-learn tqdm
    VENV/bin/pip install --no-deps fuxictr==2.3.10

Counted are training seconds without loading and validation. Both sides are workers of this script (`--worker`), run one
after the other. Prints a table and writes JSON (`--out`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

MODELS = ("DIN", "DCNv2")
SIDES = ("here", "fuxictr")
RATES = (5e-4, 1e-3)
HISTORY, FIELD, REQUESTS, EPOCHS, PATIENCE, DROPOUT, DECAY, SEED = 20, 16, 256, 8, 2, 0.2, 1e-4, 42
DIN_HIDDEN, DIN_UNIT, CROSS_LAYERS, CROSS_HIDDEN = (200, 80), (32, 16), 3, 256
SPLITS = ("train", "valid", "test")
USER_FIELDS = ("user_id", "age", "gender", "occupation", "zip", "hour", "weekday", "gap")
LIKE = 1


def auc(label: np.ndarray, score: np.ndarray) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(label, score))


class Stopwatch:
    """Wall and CPU seconds of what runs between `start` and `stop`, summed."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def start(self) -> None:
        self.since = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.wall += time.perf_counter() - self.since[0]
        self.cpu += time.process_time() - self.since[1]

    def per(self, epochs: int) -> dict[str, float]:
        return {"wall_seconds_an_epoch": self.wall / epochs, "cpu_seconds_an_epoch": self.cpu / epochs}


def export(source: Path, folder: Path) -> None:
    """Write rated rows of every split as flat arrays for FuxiCTR, histories once a request."""
    from auto_research.data.requests import RequestTable

    table = RequestTable.load(source)
    arrays: dict[str, np.ndarray] = {"genres": table.item_genres.astype(np.float32)}
    vocab = {name: int(size) for name, size in table.vocab.items()}
    for split in SPLITS:
        batch = table.batch(table.requests(split), history=HISTORY)
        of = batch.request_of.numpy()
        for name in USER_FIELDS:
            arrays[f"{split}.{name}"] = getattr(batch, name).numpy()[of]
        arrays[f"{split}.user_stats"] = batch.user_stats.numpy()[of]
        for name in ("item", "decade", "popularity", "cross", "like"):
            arrays[f"{split}.{name}"] = getattr(batch, name).numpy()
        for name in ("hist_item", "hist_rating", "hist_age", "hist_mask"):
            arrays[f"{split}.{name}"] = getattr(batch, name).numpy()
        arrays[f"{split}.request_of"] = of
    decade = np.zeros(len(table.item_genres), dtype=np.int64)
    decade[: len(table.interactions.item_decade)] = table.interactions.item_decade
    np.savez(folder / "rows.npz", item_decade=decade, **arrays)
    (folder / "vocab.json").write_text(json.dumps(vocab))


def worker_here(source: Path, folder: Path, name: str) -> dict:
    """Both trials of one model with auto_research; the better one on the test rows."""
    import torch
    import torch.nn.functional as F

    from auto_research.baselines.dcnv2 import DCNv2
    from auto_research.baselines.din import DIN
    from auto_research.data.requests import RequestTable
    from auto_research.evaluate.ctr import model_scorer, rated_batches, score_rated
    from auto_research.runtime.seeds import seed_everything
    from auto_research.train.ctr import EpochBatches, RequestBudget
    from auto_research.train.loop import Plan, fit
    from auto_research.train.optimizer import adamw
    from auto_research.train.state import StateFolder

    table, device = RequestTable.load(source), torch.device("cpu")
    budget = RequestBudget(history=HISTORY, negatives=0, batch=REQUESTS)
    rows = {split: rated_batches(table, split, history=HISTORY) for split in ("valid", "test")}
    genres = torch.from_numpy(table.item_genres)

    def build() -> torch.nn.Module:
        common = {"history": HISTORY, "field": FIELD, "dropout": DROPOUT}
        if name == "DIN":
            return DIN(table.vocab, genres, hidden=DIN_HIDDEN, unit_hidden=DIN_UNIT, **common)
        return DCNv2(table.vocab, genres, layers=CROSS_LAYERS, hidden=CROSS_HIDDEN, **common)

    def scored(model: torch.nn.Module, split: str) -> float:
        found = score_rated(model_scorer(model, device), rows[split])
        return auc(found.label, found.score)

    trials = []
    for rate in RATES:
        seed_everything(SEED)
        model = build()
        fitted = fit(
            model,
            adamw(model, rate, DECAY),
            Plan(EPOCHS, clip=1.0, key="auc", patience=PATIENCE),
            batches=lambda epoch: EpochBatches(table, budget, SEED, epoch, device),
            loss=lambda model, batch: F.binary_cross_entropy_with_logits(model(batch)[:, LIKE], batch.like),
            validate=lambda model: {"auc": scored(model, "valid")},
            state=StateFolder(folder / f"state-{name}-{rate}"),
        )
        trials.append(
            {
                "learning_rate": rate,
                "validation": fitted.validation["auc"],
                "test": scored(model, "test"),
                "epochs": len(fitted.history),
                "params": sum(p.numel() for p in model.parameters()),
                "wall_seconds_an_epoch": fitted.train_seconds / len(fitted.history),
            }
        )
        print(trials[-1], file=sys.stderr, flush=True)
    return {"trials": trials, "best": max(trials, key=lambda trial: trial["validation"])}


class Rows:
    """Batches in the layout of FuxiCTR's long-sequence models: (fields, items [rows * (history + 1), ..], mask)."""

    def __init__(self, arrays, split: str, rows: int, shuffle: bool) -> None:
        import torch

        self.torch, self.rows, self.shuffle, self.epoch = torch, rows, shuffle, 0
        self.of = {name: torch.from_numpy(arrays[f"{split}.{name}"]) for name in FLAT}
        self.history = {name: torch.from_numpy(arrays[f"{split}.{name}"]) for name in SEQUENCE}
        self.genres = torch.from_numpy(arrays["genres"])
        self.decades = torch.from_numpy(arrays["item_decade"])

    def __len__(self) -> int:
        return -(-len(self.of["like"]) // self.rows)

    def __iter__(self):
        torch, count = self.torch, len(self.of["like"])
        order = torch.arange(count)
        if self.shuffle:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED + self.epoch))
            self.epoch += 1
        for start in range(0, count, self.rows):
            yield self.batch(order[start : start + self.rows])

    def batch(self, index):
        torch = self.torch
        flat = {name: value[index] for name, value in self.of.items()}
        request = flat.pop("request_of")
        past = {name: value[request] for name, value in self.history.items()}
        target = flat.pop("item")[:, None]
        item = torch.cat([past["hist_item"], target], dim=1).flatten()
        none = torch.zeros_like(target)
        items = {
            "item": item,
            "item_genres": self.genres[item],
            "item_decade": self.decades[item],
            "item_rating": torch.cat([past["hist_rating"], none], dim=1).flatten(),
            "item_age": torch.cat([past["hist_age"], none], dim=1).flatten(),
        }
        return flat, items, past["hist_mask"]


FLAT = (*USER_FIELDS, "user_stats", "item", "popularity", "cross", "like", "request_of")
SEQUENCE = ("hist_item", "hist_rating", "hist_age", "hist_mask")


def feature_map(vocab: dict[str, int], arrays, folder: Path):
    """FuxiCTR's description of the fields; dense blocks are its type `embedding`, a projection to the field width."""
    from fuxictr.features import FeatureMap

    def categorical(name: str, **more):
        return {"source": "", "type": "categorical", "vocab_size": vocab[name], **more}

    def dense(width: int, **more):
        return {"source": "", "type": "embedding", "pretrain_dim": width, **more}

    item = {"source": "item"}
    features = {name: categorical(name) for name in USER_FIELDS}
    features |= {name: dense(arrays[f"train.{name}"].shape[1]) for name in ("user_stats", "popularity", "cross")}
    features["item"] = categorical("item", padding_idx=0) | item
    features["item_genres"] = dense(arrays["genres"].shape[1]) | item
    features["item_decade"] = categorical("decade") | item
    features["item_rating"] = categorical("hist_rating", padding_idx=0, embedding_dim=FIELD // 2) | item
    features["item_age"] = categorical("hist_age", embedding_dim=FIELD // 2) | item
    made = FeatureMap("rows", str(folder))
    made.features, made.labels, made.num_fields = features, ["like"], len(features)
    made.default_emb_dim = FIELD
    made.set_column_index()
    return made


def worker_fuxictr(source: Path, folder: Path, name: str) -> dict:
    """Both trials of one model with FuxiCTR. Runs in its environment, without auto_research."""
    import torch
    from fuxictr.pytorch.torch_utils import seed_everything
    from model_zoo.LongCTR.DCNv2.DCNv2 import DCNv2
    from model_zoo.LongCTR.DIN.DIN import DIN

    torch.set_num_threads(1)
    arrays = dict(np.load(folder / "rows.npz"))
    vocab = json.loads((folder / "vocab.json").read_text())
    size = round(len(arrays["train.like"]) / len(arrays["train.hist_item"]) * REQUESTS)
    rows = {split: Rows(arrays, split, size, shuffle=split == "train") for split in SPLITS}
    sizes = {
        "DIN": {
            "dnn_hidden_units": list(DIN_HIDDEN),
            "dnn_activations": "Dice",
            "attention_hidden_units": list(DIN_UNIT),
        },
        "DCNv2": {
            "model_structure": "stacked",
            "stacked_dnn_hidden_units": [CROSS_HIDDEN, CROSS_HIDDEN],
            "num_cross_layers": CROSS_LAYERS,
        },
    }[name]
    trials = []
    for rate in RATES:
        seed_everything(SEED)
        model = {"DIN": DIN, "DCNv2": DCNv2}[name](
            feature_map(vocab, arrays, folder),
            model_id=f"{name}-{rate}",
            gpu=-1,
            learning_rate=rate,
            embedding_dim=FIELD,
            net_dropout=DROPOUT,
            optimizer="AdamW",
            loss="binary_cross_entropy",
            metrics=["AUC"],
            monitor="AUC",
            early_stop_patience=PATIENCE,
            model_root=str(folder),
            verbose=0,
            **sizes,
        )
        Path(model.model_dir).mkdir(parents=True, exist_ok=True)
        for group in model.optimizer.param_groups:
            group["weight_decay"] = DECAY
        watch, steps = Stopwatch(), model.train_step

        def timed(batch, watch=watch, steps=steps):
            watch.start()
            loss = steps(batch)
            watch.stop()
            return loss

        loading = Timed(rows["train"])
        model.train_step = timed
        model.fit(loading, epochs=EPOCHS, validation_data=rows["valid"], max_gradient_norm=1.0)
        watch.wall, watch.cpu = watch.wall + loading.watch.wall, watch.cpu + loading.watch.cpu
        epochs = model._epoch_index + 1
        found = {split: auc(arrays[f"{split}.like"], model.predict(rows[split])) for split in ("valid", "test")}
        trials.append(
            {
                "learning_rate": rate,
                "validation": found["valid"],
                "test": found["test"],
                "epochs": epochs,
                "params": sum(p.numel() for p in model.parameters()),
                **watch.per(epochs),
            }
        )
        print(trials[-1], file=sys.stderr, flush=True)
    return {"trials": trials, "best": max(trials, key=lambda trial: trial["validation"])}


class Timed:
    """Batches whose building is timed too, as the loader's work is part of an epoch on both sides."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.watch = rows, Stopwatch()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self):
        found = iter(self.rows)
        while True:
            self.watch.start()
            batch = next(found, None)
            self.watch.stop()
            if batch is None:
                return
            yield batch


def table(results: dict[str, dict[str, dict]]) -> str:
    """Markdown table of the better trial of every model and side, and the ratios."""
    lines = [
        "| model | side | learning rate | validation AUC | test AUC | s an epoch | epochs | parameters |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, sides in results.items():
        for side, result in sides.items():
            best = result["best"]
            lines.append(
                f"| {name} | {side} | {best['learning_rate']:g} | {best['validation']:.4f} | {best['test']:.4f} |"
                f" {best['wall_seconds_an_epoch']:.1f} | {best['epochs']} | {best['params']:,} |"
            )
    for name, sides in results.items():
        if len(sides) == len(SIDES):
            here, there = (sides[side]["best"] for side in SIDES)
            ratio = there["wall_seconds_an_epoch"] / here["wall_seconds_an_epoch"]
            lines.append(
                f"\n{name}: test AUC {here['test'] - there['test']:+.4f}, seconds an epoch {ratio:.2f} times ours"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="prepared `requests` folder")
    parser.add_argument(
        "--fuxictr-python", type=Path, help="interpreter of FuxiCTR's environment; without it only ours"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/ctr_vs_fuxictr.json"))
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run, (name,) = worker_here if options.worker == "here" else worker_fuxictr, options.models
        found = run(options.data, options.folder, name)
        (options.folder / f"{options.worker}-{name}.json").write_text(json.dumps(found))
        return
    if options.data is None:
        parser.error("--data is needed: the prepared `requests` folder")
    interpreters = {"here": sys.executable, "fuxictr": options.fuxictr_python and options.fuxictr_python.absolute()}
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "AUTO_RESEARCH_CPU_THREADS": "1"}
    results: dict[str, dict[str, dict]] = {name: {} for name in options.models}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        export(options.data, folder)
        for name in options.models:
            for side, interpreter in interpreters.items():
                if interpreter is None:
                    continue
                command = [str(interpreter), str(Path(__file__).resolve()), "--worker", side, "--models", name]
                command += ["--folder", str(folder), "--data", str(options.data.absolute())]
                subprocess.run(command, check=True, env=one_thread, cwd=folder)
                results[name][side] = json.loads((folder / f"{side}-{name}.json").read_text())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
