"""Data, codes, supervised and policy training of one stage."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adapters.onerec_v2.events import EventStream, Stream, StreamRule, restricted
from adapters.onerec_v2.feedback import (
    LargestGradient,
    PolicyConfig,
    Snapshot,
    labels,
    ntp_loss,
    post_training_loss,
)
from adapters.onerec_v2.lists import Decoder
from adapters.onerec_v2.model import OneRecV2, OneRecV2Config
from auto_research.blocks.semantic_ids import SIDTable, require_hash
from auto_research.data.interactions import Interactions, load_interactions
from auto_research.data.sequences import LeaveTwoOut
from auto_research.evaluate.next_list import validation_lists
from auto_research.experiment.context import Context
from auto_research.runtime.files import read_json
from auto_research.runtime.seeds import seed_everything
from auto_research.train.fitting import FitBudget, fit_model, settings
from auto_research.train.loop import Plan, fit
from auto_research.train.next_item import load_sequences
from auto_research.train.optimizer import adamw
from auto_research.train.state import StateFolder
from auto_research.train.tuning import Trained, best_of_trials

SELECTION = "ndcg@10"


@lru_cache(maxsize=2)
def _interactions(folder: str, modified_ns: int) -> Interactions:
    return load_interactions(folder)


def load_data(ctx: Context) -> tuple[Interactions, LeaveTwoOut]:
    """Canonical interactions and leave-two-out sequences, cut to the budget's users."""
    folder = Path(ctx.data("canonical"))
    data = _interactions(str(folder.resolve()), (folder / "manifest.json").stat().st_mtime_ns)
    return data, load_sequences(ctx)


class Trainer:
    """Data, codes, supervised and policy training of one stage on one device.

    time_split: the stream is cut by global time instead of leaving each user's last two events out.
    """

    def __init__(self, ctx: Context, device: torch.device, *, time_split: bool = False):
        self.ctx, self.device, self.switch = ctx, device, ctx.switch or {}
        self.data, self.sequences = load_data(ctx)
        self.time_split = time_split
        self.stream = (
            restricted(self.data, self.sequences) if time_split else EventStream.of_sequences(self.data, self.sequences)
        )
        codes = "codes_time" if time_split else self.switch.get("codes", "codes")
        self.table = SIDTable.load(ctx.artifact(codes))
        self.config = settings(OneRecV2Config, ctx)
        self.rule = settings(StreamRule, ctx)
        self.policy = settings(PolicyConfig, ctx)

    def build(self) -> OneRecV2:
        sizes = tuple(self.data.vocab.get(name, 1) for name in ("gender", "age", "occupation"))
        return OneRecV2(self.config, self.table, torch.as_tensor(self.data.item_genres), sizes)

    def decoder(self, model: OneRecV2) -> Decoder:
        return Decoder(model, self.table, self.device, beams=self.ctx.budget.beams)

    def loaded(self) -> OneRecV2:
        """The supervised artifact's model. ConfigError when it was trained on other codes."""
        from safetensors.torch import load_file

        folder, model = self.supervised_folder(), self.build()
        require_hash(read_json(folder / "facts.json")["table_hash"], self.table.content_hash, "the supervised decoder")
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.to(self.device).eval()

    def supervised_folder(self) -> Path:
        return self.ctx.artifact("sft_time" if self.time_split else "sft")

    @torch.no_grad()
    def ntp(self, model: OneRecV2) -> float:
        """L_NTP per code of the validation targets (of the budget's validation_users)."""
        model.eval()
        rows = self.stream.targets["valid"][: self.ctx.budget.get("validation_users")]
        reader, total = Stream(self.stream, self.rule, ("read",), self.device), 0.0
        for part in np.array_split(rows, -(-len(rows) // 256)):
            total += float(ntp_loss(model, reader.read(part))) * len(part)
        return total / len(rows)

    def validate(self, model: OneRecV2) -> dict[str, float]:
        """val_ntp_loss, and ndcg@10 of the beam on the validation targets."""
        found = {"val_ntp_loss": self.ntp(model)}
        decoder, users = self.decoder(model), self.ctx.budget.get("validation_users")
        if self.time_split:
            rows = self.stream.targets["valid"][:users]
            lists = decoder.lists(self.stream, rows)
            hits = lists == self.stream.item[rows][:, None]
            return found | {SELECTION: float((hits / np.log2(2 + np.arange(10))).sum(1).mean())}
        lister = decoder.lister(self.stream)
        return found | {SELECTION: validation_lists(lister, self.sequences, users=users)[SELECTION]}

    def look_steps(self, per_pass: int) -> int:
        """Steps between two validations: the budget's epoch_steps, else its passes in `epochs` parts."""
        budget = self.ctx.budget
        return budget.get("epoch_steps") or -(-per_pass * budget.passes // budget.epochs)

    def supervised_training(self) -> tuple[Trained, list[dict]]:
        """Newest-impression training from scratch."""
        ctx, budget = self.ctx, self.ctx.budget
        stream = Stream(self.stream, self.rule, ("sft", ctx.seed), self.device)
        length = self.look_steps(stream.per_pass)

        def run(hyperparameters: dict[str, Any], state: StateFolder) -> Trained:
            seed_everything(ctx.seed)
            return fit_model(
                ctx,
                self.build().to(self.device),
                hyperparameters,
                state,
                budget=FitBudget.of(budget),
                batches=stream.steps_to_newest(length, length * budget.epochs),
                loss=ntp_loss,
                validate=self.validate,
                key=SELECTION,
                observed=ctx.out is None and not self.time_split,
            )

        return best_of_trials(ctx, run, SELECTION)

    def post_training(self, model: OneRecV2, state: StateFolder) -> tuple[Trained, float | None]:
        """Policy updates over the newest train events, in place; the largest gradient norm of the policy loss, if any."""
        ctx, config = self.ctx, self.policy
        seed_everything(ctx.seed)
        snapshot = Snapshot(model, config.refresh)
        largest = None if config.objective == "none" else LargestGradient(snapshot, config)
        stream = Stream(self.stream, self.rule, ("policy", ctx.seed), self.device, labels(self.stream, config.reward))
        each = min(ctx.budget.policy_look, config.updates)

        def after(model: OneRecV2, step: int, total: int) -> None:
            snapshot.after_step(model, step)
            if not self.time_split:
                ctx.observe("step", model=model, step=step)

        fitted = fit(
            model,
            adamw(model, config.rate, 0.0),
            Plan(-(-config.updates // each), config.updates, 1.0),
            batches=stream.steps_to_newest(each, config.updates),
            loss=lambda model, batch: post_training_loss(model, snapshot.model, batch, config),
            state=state,
            validate=lambda model: {"val_ntp_loss": self.ntp(model)},
            on_gradient=largest,
            on_step=after,
            progress=ctx.progress,
            extras={"snapshot": snapshot} | ({"largest": largest} if largest else {}),
        )
        cost = {"seconds": fitted.seconds, "train_seconds": fitted.train_seconds, "steps": fitted.steps}
        trained = Trained(model, self.validate(model), {"learning_rate": config.rate}, fitted.history, cost)
        return trained, largest and largest.value
