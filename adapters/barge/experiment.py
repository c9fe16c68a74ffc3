"""Stages of BARGE: tokenizers, floors, SASRec, TIGER on one id per item, and the model with parts taken away.

What makes an arm differ is its `switch` in card.yaml; sizes are in the budget.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from adapters.barge.model import Barge, BargeConfig
from adapters.barge.search import PRESELECT, DualSearch, expansions, fuse, scorer, survival, watched
from auto_research.baselines import ease as ease_baseline
from auto_research.baselines import itemknn as itemknn_baseline
from auto_research.baselines import popularity as popularity_baseline
from auto_research.baselines import sasrec as sasrec_baseline
from auto_research.baselines import tiger as tiger_baseline
from auto_research.blocks.beam_search import constrained_beam
from auto_research.blocks.history_generator import HistoryGenerator
from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.rqvae import RQVAEConfig
from auto_research.blocks.semantic_ids import SIDTable, resolve_collisions
from auto_research.blocks.sid_models import SIDStep
from auto_research.data.interactions import load_interactions
from auto_research.data.sequences import LeaveTwoOut
from auto_research.data.texts import load_text_vectors
from auto_research.evaluate.next_item import Measure, measure_next_item
from auto_research.evaluate.next_list import Lists, genre_entropy, split_lists, validation_lists
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement, Units
from auto_research.runtime.devices import device_for
from auto_research.runtime.files import read_json, write_json
from auto_research.train.fitting import settings
from auto_research.train.next_item import load_sequences
from auto_research.train.sid import (
    CHUNK,
    SIDBudget,
    fit_sid,
    measure_sid,
    read_history,
    seen_items,
)
from auto_research.train.tokenizer import TokenizerPlan, fit_rqvae
from auto_research.train.tuning import Trained

experiment = Experiment("barge")

LOW_RATING, DISLIKED = 2, 8


# Tokenizers


def make_codes(ctx: Context) -> None:
    """Train the tokenizer of the switch on text vectors; one table of semantic ids per channel."""
    budget, switch = ctx.budget, ctx.switch or {}
    device = device_for(ctx.device)
    vectors = load_text_vectors(ctx.data("texts"))[1:]
    channels = switch.get("channels", 2)
    sizes = (budget.codes_single if channels == 1 else budget.codes,) * 3
    config = RQVAEConfig(
        (vectors.shape[1],), sizes, ((budget.encoder_hidden,),), budget.latent, channels=channels,
        rotation=switch.get("rotation", "none"),
    )  # fmt: skip
    plan = TokenizerPlan(budget.tokenizer_steps, budget.tokenizer_warm_up)
    fitted = fit_rqvae(vectors, config, plan=plan, seed=ctx.seed, state=ctx.state, device=device, progress=ctx.progress)
    fitted.model.save(ctx.out)
    tables = [resolve_collisions(codes, sizes, "suffix") for codes in fitted.codes]
    for channel, table in enumerate(tables):
        table.save(ctx.out, f"channel_{channel}")
    facts = fitted.statistics | {
        "reconstruction_mse": fitted.statistics["reconstruction"][0] / vectors.shape[1],
        "hashes": [table.content_hash for table in tables],
    }
    write_json(ctx.out / "facts.json", facts)


@experiment.artifact
def codes(ctx: Context) -> None:
    make_codes(ctx)


@experiment.artifact
def codes_plain(ctx: Context) -> None:
    make_codes(ctx)


@experiment.artifact
def codes_random(ctx: Context) -> None:
    make_codes(ctx)


@experiment.artifact
def codes_single(ctx: Context) -> None:
    make_codes(ctx)


def load_codes(ctx: Context, name: str) -> tuple[list[SIDTable], dict[str, Any]]:
    """Tables of an artifact's channels, checked against the hashes beside them, and what else is known of them."""
    folder = ctx.artifact(name)
    facts = read_json(folder / "facts.json")
    tables = [SIDTable.load(folder, f"channel_{n}", expect=expected) for n, expected in enumerate(facts["hashes"])]
    return tables, facts


# Training


def disliked_items(ctx: Context, sequences: LeaveTwoOut) -> torch.Tensor:
    """int64[n_users + 1, 8] the newest train items that each user rated 2 or less, 0 = none."""
    data = load_interactions(ctx.data("canonical"))
    starts, found = data.user_starts(), np.zeros((data.n_users + 1, DISLIKED), dtype=np.int64)
    for user, train in zip(sequences.users, sequences.train, strict=True):
        rating = data.rating[starts[user] : starts[user] + len(train)]  # the train part comes first
        low = train[rating <= LOW_RATING][-DISLIKED:]
        found[user, : len(low)] = low
    return torch.from_numpy(found)


class Trainer:
    """Data, codes and training of one arm on one device."""

    def __init__(self, ctx: Context, device: torch.device):
        self.ctx, self.device, self.switch = ctx, device, ctx.switch or {}
        self.sequences, self.budget = load_sequences(ctx), SIDBudget.of(ctx.budget)
        self.config = settings(BargeConfig, ctx)
        self.tables, self.facts = load_codes(ctx, self.switch.get("codes", "codes"))
        self.used = self.tables[: self.switch.get("channels", len(self.tables))]
        self.disliked = disliked_items(ctx, self.sequences) if self.config.disliked else None

    def served(self, model: Barge) -> DualSearch:
        """How the arm answers: one channel alone has the beams of both."""
        width = self.budget.beam * len(self.tables) // len(self.used)
        return DualSearch(model, self.sequences, self.used, width, self.device)

    def validation(self, model: Barge) -> dict[str, float]:
        """ndcg@10, hit@10 and mrr of the lists of all channels, fused, on the validation targets."""
        search = DualSearch(model, self.sequences, self.tables, self.budget.validation_beam, self.device)
        return validation_lists(search.lister(0.0), self.sequences, users=self.budget.validation_users, chunk=CHUNK)

    def train(self) -> tuple[Trained, list[dict[str, Any]]]:
        """Joint training of encoder, decoders and path towers; the epoch is chosen without path re-ranking and by all
        channels, also where one of them answers alone."""
        return fit_sid(
            self.ctx,
            lambda _, sequences: Barge(self.tables, self.config, self.disliked),
            table=self.tables[0],
            device=self.device,
            sequences=self.sequences,
            budget=self.budget,
            validate=self.validation,
            scorer=lambda model, data: scorer(model, data, self.used, self.device),
        )

    def choose_eta(self, model: Barge) -> tuple[float, dict[float, float]]:
        """The best eta by validation ndcg@10 as served to all users (of equals the smallest), and the value of each."""
        etas = sorted(map(float, self.ctx.budget.etas)) if self.config.hpr else [0.0]
        search = self.served(model)
        found = {eta: validation_lists(search.lister(eta), self.sequences, chunk=CHUNK)["ndcg@10"] for eta in etas}
        return max(found, key=found.get), found


def train(ctx: Context, device: torch.device) -> Measurement:
    """One arm of BARGE: train, choose eta on validation, measure fused lists."""
    trainer = Trainer(ctx, device)
    trained, records = trainer.train()
    eta, by_eta = trainer.choose_eta(trained.model)
    search = trainer.served(trained.model)
    measured = measure_sid(
        trained, records, trainer.sequences, trainer.tables[0], trainer.budget, device=device,
        also=further_metrics(ctx), lister=search.lister(eta),
    )  # fmt: skip
    measured.validation = dict(trained.validation) | {"ndcg@10_served": by_eta[eta]}
    measured.cost |= {
        "encoder_tokens_per_user": trainer.config.length * trained.model.per_item,
        "beam_expansions": sum(expansions(search.width, trie) for trie in search.tries),
    }
    measured.extra |= {"eta": eta, "validation_by_eta": {f"{value:g}": score for value, score in by_eta.items()}}
    add_tokenizer(measured, trainer.facts)
    add_lists(measured, trainer, search, eta)
    return measured


def add_lists(measured: Measurement, trainer: Trainer, search: DualSearch, eta: float) -> None:
    """What the lists say beyond their ranks: survival of prefixes, overlap, and other ways to fuse them."""
    users = trainer.sequences.users
    lists = search.everyone("test", eta)
    values = lists.survival()
    other = {}
    if len(trainer.used) > 1:
        values["channel_overlap@50"] = lists.overlap()
        other = {mode: fuse(lists, mode) for mode in ("or", "and", "logsum")}
        other |= {f"channel_{n}": fuse(lists.only(n)) for n in range(len(trainer.used))}
    if eta:
        other["eta_0"] = fuse(search.everyone("test", 0.0))
    add_units(measured, values, users)
    measured.extra["ndcg@10_by_inference"] = {
        name: list_ndcg(found, trainer.sequences) for name, found in other.items()
    }


def add_tokenizer(measured: Measurement, facts: dict[str, Any]) -> None:
    """What is known of the codes; the errors of the autoencoder are metrics too."""
    measured.metrics |= {name: facts[name] for name in ("reconstruction_mse", "orthogonality_error") if name in facts}
    measured.extra["tokenizer"] = facts


def further_metrics(ctx: Context) -> Callable[[Lists], dict[str, np.ndarray]]:
    """Genre entropy of test lists, by its contributions."""
    genres = load_interactions(ctx.data("canonical")).item_genres
    return lambda lists: {"genre_entropy@10": genre_entropy(lists.items[:, :10], genres)}


def measure_scores(ctx: Context) -> Measure:
    """The metrics of the generators' lists for a baseline that scores all items."""
    return partial(measure_next_item, at=(5,), also=further_metrics(ctx))


def add_units(measured: Measurement, values: dict[str, np.ndarray], users: np.ndarray) -> None:
    """Means of float[U] contributions as metrics, with the contributions."""
    measured.metrics |= {name: float(value.mean()) for name, value in values.items()}
    measured.units |= {name: Units("user", users, value) for name, value in values.items()}


def list_ndcg(lists: np.ndarray, sequences: LeaveTwoOut) -> float:
    """Test ndcg@10 of lists of all users."""
    return float(split_lists(lambda split, positions: lists[positions], sequences, "test").ndcg(10).mean())


# Baselines


def train_tiger(ctx: Context, device: torch.device) -> Measurement:
    """TIGER's generator on one id per item: same width, layers, items, steps; as many beams as both channels have.

    Its loss is a sum over the codes of a path where BARGE's is their mean, hence the bound of its gradients.
    """
    sequences, base = load_sequences(ctx), SIDBudget.of(ctx.budget)
    budget = SIDBudget.of(ctx.budget, beam=2 * base.beam, validation_beam=2 * base.validation_beam)
    (table,), facts = load_codes(ctx, "codes_single")
    measured, trained = tiger_baseline.train_generator(
        ctx, table, device=device, sequences=sequences, also=further_metrics(ctx), beam=budget.beam,
        validation_beam=budget.validation_beam, layers=2 * ctx.budget.layers, source="flat", user_token=False,
        user_tokens=0, clip=table.levels * base.clip,
    )  # fmt: skip
    measured.cost |= {
        "encoder_tokens_per_user": budget.length * table.levels,
        "beam_expansions": expansions(budget.beam, PrefixTrie.of(table)),
    }
    add_tokenizer(measured, facts)
    survived = tiger_survival(trained.model, sequences, table, budget, device)
    add_units(measured, survival(survived[None]), sequences.users)
    return measured


@torch.no_grad()
def tiger_survival(
    model: HistoryGenerator, sequences: LeaveTwoOut, table: SIDTable, budget: SIDBudget, device: torch.device
) -> np.ndarray:
    """bool[U, L'], which prefixes of the test target stayed in the beam."""
    trie, codes = PrefixTrie.of(table, device), torch.from_numpy(table.codes).to(device)
    survived = []
    for start in range(0, len(sequences), CHUNK):
        positions = np.arange(start, min(start + CHUNK, len(sequences)))
        ctx = read_history(model, sequences, "test", positions, budget.length, device)
        alive = trie.alive(torch.from_numpy(seen_items(sequences, "test", positions)).to(device))
        target = codes[torch.from_numpy(sequences.target("test")[positions]).to(device)]
        kept: list[torch.Tensor] = []
        hook = watched(lambda expansion: expansion.logp, budget.beam, target, kept)
        constrained_beam(SIDStep(model), ctx, trie, budget.beam, on_level=hook, alive=alive, preselect=PRESELECT)
        survived.append(torch.stack(kept, dim=1).cpu().numpy())
    return np.concatenate(survived)


@experiment.arm
def popularity(ctx: Context) -> Measurement:
    return popularity_baseline.run(ctx, device=device_for(ctx.device), measure=measure_scores(ctx))


@experiment.arm
def itemknn(ctx: Context) -> Measurement:
    return itemknn_baseline.run(ctx, device=device_for(ctx.device), measure=measure_scores(ctx))


@experiment.arm
def ease(ctx: Context) -> Measurement:
    return ease_baseline.run(ctx, device=device_for(ctx.device), measure=measure_scores(ctx))


@experiment.arm
def sasrec(ctx: Context) -> Measurement:
    """The recipe of the baseline; the budget's `sasrec` changes it, other keys of the budget do not."""
    chosen = {**sasrec_baseline.SIZES, **sasrec_baseline.RECIPE, "steps": None, **ctx.budget.get("sasrec", {})}
    return sasrec_baseline.run(ctx, device=device_for(ctx.device), measure=measure_scores(ctx), **chosen)


@experiment.arm
def tiger(ctx: Context) -> Measurement:
    return train_tiger(ctx, device_for(ctx.device))


@experiment.arm
def barge(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def barge_no_ica(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def barge_no_hpr(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def barge_channel_a(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def barge_no_rotation(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def barge_random_rotation(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))


@experiment.arm
def barge_disliked(ctx: Context) -> Measurement:
    return train(ctx, device_for(ctx.device))
