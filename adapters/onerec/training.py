"""Data, codes and supervised training of a stage, and the weights that artifacts hold."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from adapters.onerec.decoding import Decoder
from adapters.onerec.model import OneRecConfig, SessionGenerator
from adapters.onerec.sessions import SessionSplit, SessionSteps, histories, target_batch
from auto_research.blocks.semantic_ids import SIDTable, SIDVocab, require_hash
from auto_research.experiment.context import Context
from auto_research.runtime.files import read_json, write_json
from auto_research.runtime.seeds import seed_everything, stable_rng
from auto_research.train.fitting import FitBudget, fit_model, load_split, settings
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained, best_of_trials

NTP = "ntp_val_loss"


def load_data(ctx: Context) -> SessionSplit:
    """The split with the budget's session length."""
    data = load_split(ctx, SessionSplit.build)
    size = ctx.budget.get("session_events", data.size)
    return data if size == data.size else SessionSplit(data.interactions, data.users, data.first, data.stop, size)


def history_of(data: SessionSplit, split: str, positions: np.ndarray, length: int) -> np.ndarray:
    return histories(data, data.target_start(split)[positions], positions, length)


def save_weights(model: torch.nn.Module, folder: Path, **facts: Any) -> None:
    from safetensors.torch import save_file

    save_file({name: value.cpu().contiguous() for name, value in model.state_dict().items()},
              folder / "model.safetensors")  # fmt: skip
    write_json(folder / "facts.json", facts)


def load_weights(model: torch.nn.Module, folder: Path) -> dict[str, Any]:
    """Fill a model on the CPU from an artifact; its facts."""
    from safetensors.torch import load_file

    model.load_state_dict(load_file(folder / "model.safetensors"))
    return read_json(folder / "facts.json")


def without_clock(curve: list[dict]) -> list[dict]:
    return [{name: value for name, value in entry.items() if not name.endswith("seconds")} for entry in curve]


class Trainer:
    """Data, codes and supervised training of one stage on one device."""

    def __init__(self, ctx: Context, device: torch.device):
        self.ctx, self.device, self.data = ctx, device, load_data(ctx)
        self.switch = ctx.switch or {}
        self.table = SIDTable.load(ctx.artifact(self.switch.get("codes", "codes")))
        self.vocab = SIDVocab.of(self.table)
        single = {"session": 1} if self.switch.get("pointwise") else {"session": self.data.size}
        self.config = settings(OneRecConfig, ctx, **single)
        order = stable_rng("validation-users").permutation(len(self.data))
        users = np.sort(order[: ctx.budget.get("validation_users")])
        self.valid = target_batch(self.data, "valid", users, self.config.history)

    def build(self) -> SessionGenerator:
        return SessionGenerator(self.config, self.table, self.vocab)

    def decoder(self, model: SessionGenerator) -> Decoder:
        return Decoder(model, self.table, self.device, beams=self.ctx.budget.beams)

    def supervised(self) -> SessionGenerator:
        """The SFT artifact's generator. ConfigError when it was trained on other codes."""
        model = self.build()
        facts = load_weights(model, self.ctx.artifact("sft"))
        require_hash(facts["table_hash"], self.table.content_hash, "the supervised generator")
        return model.to(self.device).eval()

    @torch.no_grad()
    def ntp(self, model: SessionGenerator) -> float:
        """L_NTP per code on validation sessions."""
        model.eval()
        total = 0.0
        for start in range(0, len(self.valid.history), 256):
            part = type(self.valid)(*(x[start : start + 256].to(self.device) for x in self.valid))
            total += float(model.ntp(part).sum())
        return total / (len(self.valid.history) * self.valid.session.shape[1] * self.vocab.levels)

    def tuned(self) -> tuple[Trained, list[dict]]:
        """Train from scratch by L_NTP until it stops falling."""
        ctx, budget = self.ctx, self.ctx.budget
        batches = SessionSteps(
            self.data, batch=budget.batch, epoch_steps=budget.epoch_steps, history=self.config.history,
            seed=("sft", ctx.seed), device=self.device,
        )  # fmt: skip

        def run(hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
            seed_everything(ctx.seed)
            return fit_model(
                ctx,
                self.build().to(self.device),
                hyperparameters,
                state,
                budget=FitBudget.of(budget),
                batches=batches.epoch,
                loss=lambda model, batch: model.loss(batch),
                validate=lambda model: {NTP: self.ntp(model)},
                key=NTP,
                higher_is_better=False,
                observed=ctx.out is None,
            )

        return best_of_trials(ctx, run, NTP, higher_is_better=False)
