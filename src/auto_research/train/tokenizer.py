"""Train an RQ-VAE tokenizer, resumable like every other training, and export the codes of its trained books."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auto_research.blocks.residual_kmeans import code_statistics, mutual_information
from auto_research.blocks.rqvae import RQVAE, RQVAEConfig, build_rqvae
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.seeds import stable_rng
from auto_research.train.loop import Plan, fit
from auto_research.train.optimizer import adamw
from auto_research.train.state import StateFolder

RESET_EVERY = 100


@dataclass(frozen=True)
class TokenizerPlan:
    """steps: with code books, after `warm_up` unquantised ones.  batch, pair_batch: items, pairs a step."""

    steps: int = 1500
    warm_up: int = 0
    batch: int = 512
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    pair_batch: int = 256
    reset_every: int = RESET_EVERY


@dataclass
class FittedRQVAE:
    """What a fit leaves: one entry a channel of codes (int64[I, L]) and books (L arrays float32[K_l, d]).

    model: on the CPU in eval mode; its `codes` give the exported ones again.  statistics: reconstruction (mean squared
    norm of x - xhat per modality, summed over dimensions), quantisation_error (of z after every level), per channel
    utilisation, perplexity, distinct, largest_group, shared_items, and normalised_mutual_information of the first
    levels of the first two channels.  history: losses of the training loop.
    """

    model: RQVAE
    codes: list[np.ndarray]
    books: list[list[np.ndarray]]
    statistics: dict[str, Any]
    history: list[dict[str, float]]
    seconds: float


def fit_rqvae(
    x: np.ndarray | Sequence[np.ndarray],
    config: RQVAEConfig,
    *,
    plan: TokenizerPlan,
    seed: int,
    state: StateFolder,
    device: torch.device | str,
    pairs: np.ndarray | None = None,
    progress: Callable[..., None] | None = None,
) -> FittedRQVAE:
    """Train on the whole catalogue x float[I, D] (or one array a modality) and export codes.

    pairs: int64[P, 2] rows of x that belong together, for config.pair_weight > 0. Books start from k-means of the
    latents after the warm-up. An entry that no item uses is moved to a random current residual every `reset_every`
    steps, not in the last ones. Batches, depths and draws are functions of the seed and the step.
    Raises ConfigError for arrays that do not fit the configuration.
    """
    arrays = _checked(x, config)
    if (config.pair_weight > 0) != (pairs is not None):
        raise ConfigError("pairs and a pair weight above 0 come together")
    inputs = [torch.from_numpy(array).to(device) for array in arrays]
    model = build_rqvae(config, seed).to(device)
    if plan.warm_up == 0:
        model.start_quantising(inputs, seed)
    schedule = _Batches(len(arrays[0]), config, plan, seed, pairs)

    def loss(model: RQVAE, batch: dict[str, np.ndarray | None]) -> Tensor:
        moved = {k: None if v is None else torch.from_numpy(v).to(device) for k, v in batch.items()}
        rows = [x[moved["rows"]] for x in inputs]
        return model.losses(rows, depth=moved["depth"], pairs=moved["pairs"])["loss"]

    def after_step(model: RQVAE, step: int, total: int) -> None:
        if step == plan.warm_up:
            model.start_quantising(inputs, seed)
        elif step > plan.warm_up and step % plan.reset_every == 0 and step <= total - plan.reset_every:
            model.reset_unused(inputs, seed, step)

    total = plan.warm_up + plan.steps
    fitted = fit(
        model,
        adamw(model, plan.learning_rate, plan.weight_decay),
        Plan(epochs=-(-total // schedule.length), steps=total, clip=None),
        batches=schedule.epoch,
        loss=loss,
        state=state,
        on_step=after_step,
        progress=progress,
    )
    model = model.to("cpu").eval()
    return _export(model, arrays, fitted.history, fitted.seconds)


class _Batches:
    """Batches as functions of the step: rows of seeded passes over the catalogue, depths, pairs."""

    def __init__(self, items: int, config: RQVAEConfig, plan: TokenizerPlan, seed: int, pairs: np.ndarray | None):
        self.items, self.config, self.plan, self.seed, self.pairs = items, config, plan, seed, pairs
        self.length = plan.reset_every  # steps an epoch of the loop; short passes would save a state every few steps
        self.batch = min(plan.batch, items)
        self.per_pass = -(-items // self.batch)

    def epoch(self, epoch: int) -> Sequence[dict[str, np.ndarray | None]]:
        return _Lazy(self.length, lambda index: self.at(epoch * self.length + index))

    def at(self, step: int) -> dict[str, np.ndarray | None]:
        number, part = divmod(step, self.per_pass)
        order = stable_rng("rqvae-rows", self.seed, number).permutation(self.items)
        rows = order[part * self.batch : (part + 1) * self.batch]
        rng = stable_rng("rqvae-step", self.seed, step)
        depth = None
        if self.config.progressive:
            depth = rng.integers(1, len(self.config.sizes) + 1, size=len(rows))
        pairs = None
        if self.pairs is not None:
            pairs = self.pairs[rng.integers(len(self.pairs), size=self.plan.pair_batch)].astype(np.int64)
            rows = np.concatenate([rows, pairs[:, 0], pairs[:, 1]])
        return {"rows": rows, "depth": depth, "pairs": pairs}


class _Lazy(Sequence):
    def __init__(self, length: int, at: Callable[[int], Any]):
        self.length, self.at = length, at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.at(index)


def _checked(x, config: RQVAEConfig) -> list[np.ndarray]:
    arrays = [x] if isinstance(x, np.ndarray) else list(x)
    arrays = [np.ascontiguousarray(array, dtype=np.float32) for array in arrays]
    widths = tuple(array.shape[1] for array in arrays if array.ndim == 2)
    if widths != tuple(config.inputs) or len({len(array) for array in arrays}) != 1 or not len(arrays[0]):
        raise ConfigError(f"an RQ-VAE for inputs {list(config.inputs)} got arrays {[list(a.shape) for a in arrays]}")
    if not all(np.isfinite(array).all() for array in arrays):
        raise ConfigError("vectors to tokenize hold NaN or infinity")
    return arrays


@torch.no_grad()
def _export(model: RQVAE, arrays: list[np.ndarray], history: list[dict[str, float]], seconds: float) -> FittedRQVAE:
    inputs = [torch.from_numpy(array) for array in arrays]
    z = model.latent(inputs)
    found = [q(part) for q, part in zip(model.quantizers, model.channels(z), strict=True)]
    codes = [q.codes.numpy() for q in found]
    shown = model.decode(torch.cat([q.vectors.sum(1) for q in found], dim=1))
    left = [[float((part - q.vectors[:, : n + 1].sum(1)).square().sum(1).mean()) for n in range(q.codes.shape[1])]
            for q, part in zip(found, model.channels(z), strict=True)]  # fmt: skip
    statistics = {
        "reconstruction": [float((x - out).square().sum(1).mean()) for x, out in zip(inputs, shown, strict=True)],
        "quantisation_error": left,
        "channels": [code_statistics(c, model.config.sizes) for c in codes],
    }
    if len(codes) > 1:
        shared = mutual_information(codes[0][:, 0], codes[1][:, 0], normalised=True)
        statistics["normalised_mutual_information"] = shared
    if model.rotation is not None:
        turned = model.rotation(torch.eye(model.config.width))
        statistics["orthogonality_error"] = float((turned @ turned.t() - torch.eye(model.config.width)).abs().max())
    return FittedRQVAE(model, codes, model.books(), statistics, history, seconds)
