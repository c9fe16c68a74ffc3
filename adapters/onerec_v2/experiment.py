"""Stages of OneRec-V2: codes, the supervised lazy decoder, policy arms from it, and the generators it is compared with.

What makes a stage differ is its `switch` in card.yaml; sizes are in the budget.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from adapters.onerec_v2.events import EventStream, Stream, StreamRule, restricted
from adapters.onerec_v2.feedback import labels, ntp_loss
from adapters.onerec_v2.lists import Decoder, feedback_metrics, pair_gap, time_report
from adapters.onerec_v2.model import OneRecV2, OneRecV2Config
from adapters.onerec_v2.training import Trainer, load_data
from auto_research.baselines import ease as ease_floor
from auto_research.baselines import itemknn as itemknn_floor
from auto_research.baselines import popularity as popularity_floor
from auto_research.baselines import sasrec as sasrec_baseline
from auto_research.blocks.preference import frozen_reference, weights_hash
from auto_research.blocks.residual_kmeans import rq_kmeans
from auto_research.blocks.semantic_ids import permuted_codes, resolve_collisions
from auto_research.data.interactions import Interactions
from auto_research.data.item_vectors import item_cf_vectors, text_and_cf_vectors
from auto_research.data.sequences import LeaveTwoOut
from auto_research.data.texts import load_text_vectors
from auto_research.evaluate.next_list import measure_next_list
from auto_research.evaluate.serving import TIMED, median_seconds
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.experiment.studies import study
from auto_research.metrics.cost import count_params, flops_of
from auto_research.runtime.devices import device_for
from auto_research.runtime.files import read_json, write_json
from auto_research.train.fitting import settings
from auto_research.train.next_item import load_sequences
from auto_research.train.tuning import Trained

experiment = Experiment("onerec-v2")

STUDY_EVENTS = (10, 20, 50, 100, 200)


# Artifacts


def make_codes(ctx: Context, train: Sequence[np.ndarray], popularity: np.ndarray) -> None:
    """Residual k-means of text and collaborative vectors; items of one tuple follow each other by train popularity.

    train: int64 train items of every user.  popularity: int64[n_items + 1].
    """
    cf = item_cf_vectors(train, len(popularity) - 1)
    vectors = text_and_cf_vectors(load_text_vectors(ctx.data("texts")), cf)
    found = rq_kmeans(vectors[1:], ctx.budget.codes, seed=ctx.seed)
    codes = permuted_codes(found.codes, seed=ctx.seed) if (ctx.switch or {}).get("permuted") else found.codes
    table = resolve_collisions(codes, ctx.budget.codes, "group", popularity=popularity)
    table.save(ctx.out)
    write_json(ctx.out / "facts.json", {"residual": found.residual, "hash": table.content_hash})


@experiment.artifact
def codes(ctx: Context) -> None:
    device_for(ctx.device)
    sequences = load_sequences(ctx)
    make_codes(ctx, sequences.train, sequences.popularity())


@experiment.artifact
def codes_random(ctx: Context) -> None:
    device_for(ctx.device)
    sequences = load_sequences(ctx)
    make_codes(ctx, sequences.train, sequences.popularity())


@experiment.artifact
def codes_time(ctx: Context) -> None:
    """Codes of the train part of the global time split; those of leave-two-out know events after its cut."""
    device_for(ctx.device)
    stream = restricted(*load_data(ctx))
    make_codes(ctx, stream.train_lists(), stream.popularity())


def make_supervised(ctx: Context, trainer: Trainer) -> None:
    from safetensors.torch import save_file

    best, _ = trainer.supervised_training()
    save_file(
        {name: value.cpu().contiguous() for name, value in best.model.state_dict().items()},
        ctx.out / "model.safetensors",
    )
    curve = [{name: v for name, v in entry.items() if not name.endswith("seconds")} for entry in best.curve]
    facts = {"table_hash": trainer.table.content_hash, "validation": best.validation, "curve": curve}
    write_json(ctx.out / "facts.json", facts | {"hyperparameters": best.hyperparameters, "steps": best.cost["steps"]})


@experiment.artifact
def sft(ctx: Context) -> None:
    """The supervised lazy decoder that policies start from."""
    make_supervised(ctx, Trainer(ctx, device_for(ctx.device)))


@experiment.artifact
def sft_time(ctx: Context) -> None:
    """The same on the global time split, for the second report."""
    make_supervised(ctx, Trainer(ctx, device_for(ctx.device), time_split=True))


# Measuring


def measured_generator(trainer: Trainer, best: Trained, trials: list[dict]) -> Measurement:
    """Test measurement of a trained generator."""
    ctx, model, stream = trainer.ctx, best.model.eval(), trainer.stream
    decoder = trainer.decoder(model)
    ctx.observe(
        "trained",
        model=model,
        data=trainer.sequences,
        score=lambda data, split, positions: decoder.scores(
            EventStream.of_sequences(trainer.data, data), split, positions
        ),
        validation=best.validation,
    )
    measured = measure_next_list(decoder.lister(stream), trainer.sequences)
    measured.metrics["val_ntp_loss"] = best.validation["val_ntp_loss"]
    add_feedback(trainer.data, trainer.sequences, measured)
    gap = pair_gap(decoder, stream, labels(stream), trainer.rule)
    measured.metrics["preference_logprob_gap"] = gap["gap"]
    measured.extra["test_logp_by_label"] = gap
    measured.validation, measured.curve = best.validation, best.curve
    measured.hyperparameters, measured.trials = best.hyperparameters, trials
    measured.cost |= best.cost | costs(trainer, decoder)
    measured.extra["codes"] = trainer.table.statistics()
    return measured


def add_feedback(data: Interactions, sequences: LeaveTwoOut, measured: Measurement) -> None:
    """recall@10, and the metrics of liked and disliked test events, from the contributions a next-item arm has."""
    stream = EventStream.of_sequences(data, sequences)
    feedback_metrics(measured, labels(stream)[stream.targets["test"]])


@torch.no_grad()
def costs(trainer: Trainer, decoder: Decoder) -> dict[str, float]:
    """Parameters, FLOPs of one sample and the context's share of it, bytes of keys and values, milliseconds of a list."""
    model, stream = decoder.model, trainer.stream
    row = stream.targets["test"][:1]
    reader = Stream(stream, trainer.rule, ("read",), trainer.device)
    sample = reader.read(row)
    batch = reader.read(stream.targets["test"][: trainer.rule.batch])
    whole = float(flops_of(lambda: ntp_loss(model, sample)))
    context = float(flops_of(lambda: model.read(sample.context)))
    clock = {"timed": trainer.ctx.budget.get("timed", TIMED)}
    forward = median_seconds(lambda: ntp_loss(model, batch), trainer.device, **clock)
    return {
        "params": count_params(model),
        "flops": whole,
        "flops_per_sample_fwd": whole,
        "context_share_of_flops": context / whole,
        "kv_bytes_per_user": float(decoder.context_bytes(sample.context)),
        "user_ms": 1e3 * median_seconds(lambda: decoder.lists(stream, row), trainer.device, **clock),
        "samples_per_s": len(batch.target) / forward,
    }


def cost_studies(trainer: Trainer) -> dict[str, Any]:
    """FLOPs of one sample and bytes of its keys and values by the length of the context, untrained weights."""
    flops, kept = [], []
    for events in trainer.ctx.budget.get("study_events", STUDY_EVENTS):
        config = settings(OneRecV2Config, trainer.ctx, history=events)
        sizes = tuple(trainer.data.vocab.get(name, 1) for name in ("gender", "age", "occupation"))
        model = OneRecV2(config, trainer.table, torch.as_tensor(trainer.data.item_genres), sizes).to(trainer.device)
        rule = settings(StreamRule, trainer.ctx, history=events)
        longest = trainer.stream.targets["test"][[np.argmax(np.diff(trainer.sequences.train_starts))]]
        sample = Stream(trainer.stream, rule, ("read",), trainer.device).read(longest)
        model.eval()
        with torch.no_grad():
            flops.append((events, flops_of(lambda model=model, sample=sample: ntp_loss(model, sample))))
            kept.append((events, Decoder(model, trainer.table, trainer.device, beams=1).context_bytes(sample.context)))
    x = "events of the context"
    return {
        "flops_per_sample": study(x, "FLOPs", {"": flops}),
        "kv_bytes_per_user": study(x, "bytes of keys and values", {"": kept}),
    }


def train_generator(ctx: Context, device: torch.device) -> Measurement:
    """One arm that trains a generator of its own."""
    trainer = Trainer(ctx, device)
    best, trials = trainer.supervised_training()
    measured = measured_generator(trainer, best, trials)
    measured.extra["studies"] = cost_studies(trainer)
    return measured


def time_split_of(ctx: Context, device: torch.device, policy: bool) -> dict[str, Any]:
    """The second report of the supervised decoder, or of the policy trained from it."""
    trainer = Trainer(ctx, device, time_split=True)
    model = trainer.loaded()
    if policy:
        model = trainer.post_training(model, ctx.state.child("time"))[0].model.eval()
    decoder = trainer.decoder(model)
    return time_report(trainer.stream, lambda rows: decoder.lists(trainer.stream, rows), labels(trainer.stream))


def supervised_seconds(trainer: Trainer) -> float:
    """What making the SFT artifact took."""
    return read_json(trainer.supervised_folder() / "manifest.json")["cost"]["seconds"]


def supervised_arm(ctx: Context, device: torch.device) -> Measurement:
    """The SFT artifact as it is."""
    trainer = Trainer(ctx, device)
    facts = read_json(trainer.supervised_folder() / "facts.json")
    best = Trained(trainer.loaded(), facts["validation"], facts["hyperparameters"], facts["curve"])
    spent = supervised_seconds(trainer)
    best.cost = {"steps": facts["steps"], "seconds": spent, "sft_seconds": spent}
    measured = measured_generator(trainer, best, [])
    measured.extra["studies"] = cost_studies(trainer)
    measured.extra["time_split"] = time_split_of(ctx, device, policy=False)
    return measured


def policy_arm(ctx: Context, device: torch.device) -> Measurement:
    """Policy updates from the SFT artifact, as the switch says, and what they did to feedback and likelihood."""
    trainer = Trainer(ctx, device)
    model = trainer.loaded()
    before = frozen_reference(model)
    best, largest = trainer.post_training(model, ctx.state.child("policy"))
    measured = measured_generator(trainer, best, [])
    decoder, sft = trainer.decoder(best.model), trainer.decoder(before)
    label, rule = labels(trainer.stream), trainer.rule
    kl = decoder.divergence(sft, trainer.stream, trainer.stream.targets["test"], seed=ctx.seed)
    measured.metrics["kl_to_sft"] = kl
    if largest is not None:
        measured.metrics["max_grad_norm_rl"] = largest
    measured.extra["alignment"] = {
        "reference": weights_hash(before),
        "before": pair_gap(sft, trainer.stream, label, rule),
        "after": pair_gap(decoder, trainer.stream, label, rule),
        "kl_to_sft": kl,
        "train_labels": {str(a): int((label[trainer.stream.train] == a).sum()) for a in (-1, 0, 1)},
    }
    measured.cost["sft_seconds"] = supervised_seconds(trainer)
    measured.cost["seconds"] += measured.cost["sft_seconds"]
    if trainer.switch.get("time_report"):
        measured.extra["time_split"] = time_split_of(ctx, device, policy=True)
    return measured


# Floors and baseline


def floor(ctx: Context, run) -> Measurement:
    """A next-item floor or baseline with the feedback metrics."""
    measured = run(ctx)
    data, sequences = load_data(ctx)
    add_feedback(data, sequences, measured)
    return measured


@experiment.arm
def popularity(ctx: Context) -> Measurement:
    measured = floor(ctx, partial(popularity_floor.run, device=device_for(ctx.device)))
    stream = restricted(*load_data(ctx))
    order = np.argsort(-stream.popularity()[1:], kind="stable") + 1

    def lists(rows: np.ndarray) -> np.ndarray:
        return np.stack([order[~np.isin(order, stream.history(row))][:10] for row in rows])

    measured.extra["time_split"] = time_report(stream, lists, labels(stream))
    return measured


@experiment.arm
def itemknn(ctx: Context) -> Measurement:
    return floor(ctx, partial(itemknn_floor.run, device=device_for(ctx.device)))


@experiment.arm
def ease(ctx: Context) -> Measurement:
    return floor(ctx, partial(ease_floor.run, device=device_for(ctx.device)))


@experiment.arm
def sasrec(ctx: Context) -> Measurement:
    options = {**sasrec_baseline.SIZES, **sasrec_baseline.RECIPE, **ctx.budget.get("sasrec", {})}
    return floor(ctx, partial(sasrec_baseline.run, device=device_for(ctx.device), **options))


# Arms


@experiment.arm
def encoder_decoder(ctx: Context) -> Measurement:
    return train_generator(ctx, device_for(ctx.device))


@experiment.arm
def classic_decoder_only(ctx: Context) -> Measurement:
    return train_generator(ctx, device_for(ctx.device))


@experiment.arm
def lazy_sft(ctx: Context) -> Measurement:
    return supervised_arm(ctx, device_for(ctx.device))


@experiment.arm
def lazy_separate_kv(ctx: Context) -> Measurement:
    return train_generator(ctx, device_for(ctx.device))


@experiment.arm
def lazy_random_codes(ctx: Context) -> Measurement:
    return train_generator(ctx, device_for(ctx.device))


@experiment.arm
def lazy_random_order(ctx: Context) -> Measurement:
    return train_generator(ctx, device_for(ctx.device))


@experiment.arm
def lazy_sft_longer(ctx: Context) -> Measurement:
    return policy_arm(ctx, device_for(ctx.device))


@experiment.arm
def lazy_ppo_clip(ctx: Context) -> Measurement:
    return policy_arm(ctx, device_for(ctx.device))


@experiment.arm
def lazy_gbpo_raw_reward(ctx: Context) -> Measurement:
    return policy_arm(ctx, device_for(ctx.device))


@experiment.arm
def lazy_gbpo_token(ctx: Context) -> Measurement:
    return policy_arm(ctx, device_for(ctx.device))


@experiment.arm
def onerec_v2(ctx: Context) -> Measurement:
    return policy_arm(ctx, device_for(ctx.device))
