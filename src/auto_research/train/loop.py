"""The training loop every trained arm uses: it can be killed at any moment and goes on as if nothing had happened.

On one device and one thread count a resumed run ends with the same bits as an uninterrupted one. For that the order of
batches has to be a function of (seed, epoch, index), never of a generator that lives from batch to batch; dropout and
other draws from the global generators are saved and restored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from auto_research.runtime.devices import synchronize
from auto_research.runtime.errors import NonFinite
from auto_research.runtime.seeds import restore_rng, rng_state
from auto_research.train.state import StateFolder

ACCELERATOR_CHECK_STEPS = 16  # on accelerators a look at the loss waits for the device


class Stateful(Protocol):
    """Anything else that changes while training: a controller, a teacher average, a schedule of its own."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Plan:
    """How long to train and how to choose.

    epochs: cap.  steps: cap on optimizer steps over all epochs (None: no cap).  clip: largest gradient norm.
    key: the validation value that chooses the epoch (None: the last epoch stands).  patience: validations without an
    improvement before stopping (None: never stop).  validate_every: epochs between validations.
    checkpoint_seconds: between saves (None: as the state folder says).
    """

    epochs: int
    steps: int | None = None
    clip: float | None = 1.0
    key: str | None = None
    higher_is_better: bool = True
    patience: int | None = None
    validate_every: int = 1
    checkpoint_seconds: float | None = None


@dataclass
class Fitted:
    """What `fit` did. The model holds the weights of `best_epoch` (1-based).

    history: one dict per epoch (epoch, step, loss, seconds, and the validation values when there was one).
    seconds: training and validation, without the time a killed process spent after its last checkpoint.
    """

    history: list[dict[str, float]]
    best_epoch: int
    validation: dict[str, float]
    steps: int
    seconds: float
    train_seconds: float


@dataclass
class _Progress:
    epoch: int = 0  # epochs finished
    index: int = 0  # batches done in the current epoch
    step: int = 0
    loss_sum: Tensor | None = None
    history: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, Any] | None = None  # epoch, value, validation, weights
    waited: int = 0
    seconds: float = 0.0
    train_seconds: float = 0.0
    done: bool = False


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    *,
    batches: Callable[[int], Sequence],
    loss: Callable[[nn.Module, Any], Tensor],
    state: StateFolder,
    validate: Callable[[nn.Module], dict[str, float]] | None = None,
    schedule: Callable[[int, int], float] | None = None,
    on_gradient: Callable[[nn.Module, Any], None] | None = None,
    on_step: Callable[[nn.Module, int, int], None] | None = None,
    progress: Callable[..., None] | None = None,
    extras: Mapping[str, Stateful] | None = None,
) -> Fitted:
    """Train `model`, or go on from what `state` holds, and leave the best epoch's weights in it.

    With `state.pause_after` it may end before that, with the weights it has; see `StateFolder`.

    Parameters
    ----------
    batches: epoch (0-based) -> sequence of batches, a pure function of the epoch; it may build them lazily.
    loss: (model, batch) -> scalar.
    validate: model -> values; called after every `validate_every` epochs and after the last one, in eval mode.
    schedule: (step, total steps) -> factor of every group's learning rate, before each step, step from 0.
    on_gradient: (model, batch), after backward and before clipping.
    on_step: (model, step, total steps), after the optimizer step, step from 1.
    progress: (done, total, loss=, **validation), called after every step and epoch; it throttles itself.
    extras: more things to save and restore.

    Raises NonFinite with the step's number when loss, gradient norm or a validation value is NaN or infinite.
    """
    run = _Run(model, optimizer, plan, state, dict(extras or {}))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    guard = _FiniteGuard(1 if device.type == "cpu" else ACCELERATOR_CHECK_STEPS)
    base_rates = [group["lr"] for group in optimizer.param_groups]
    now = run.resume(device)
    total = _total_steps(plan, len(batches(0)))
    clock = _Clock(device)
    every = state.checkpoint_seconds if plan.checkpoint_seconds is None else plan.checkpoint_seconds
    saved_at = time.monotonic()
    while not now.done and (state.pause_after is None or now.epoch < state.pause_after):
        epoch_batches = batches(now.epoch)
        model.train()
        clock.start()
        while now.index < len(epoch_batches) and (plan.steps is None or now.step < plan.steps):
            batch = epoch_batches[now.index]
            for group, rate in zip(optimizer.param_groups, base_rates, strict=True):
                group["lr"] = rate * (schedule(now.step, total) if schedule else 1.0)
            value = _step(model, optimizer, plan, batch, loss, on_gradient, guard, now.step + 1)
            now.loss_sum = value if now.loss_sum is None else now.loss_sum + value
            now.index += 1
            now.step += 1
            if on_step:
                on_step(model, now.step, total)
            if progress:
                shown = {"loss": float(value)} if device.type == "cpu" else {}
                progress(now.step, total, epoch=now.epoch + 1, **shown)
            if time.monotonic() - saved_at >= every:
                guard.check()
                clock.lap(now, train=True)
                run.save(now)
                saved_at = time.monotonic()
        guard.check()
        clock.lap(now, train=True)
        _finish_epoch(model, plan, now, validate, clock, total)
        if progress:
            progress(now.step, total, **now.history[-1])
        if now.done and now.best is not None:
            model.load_state_dict(now.best["weights"])
        run.save(now)
        saved_at = time.monotonic()
    model.eval()
    best = now.best or {"epoch": now.epoch, "validation": {}}
    return Fitted(now.history, best["epoch"], best["validation"], now.step, now.seconds, now.train_seconds)


def _total_steps(plan: Plan, per_epoch: int) -> int:
    total = plan.epochs * per_epoch
    return total if plan.steps is None else min(total, plan.steps)


def _step(model, optimizer, plan, batch, loss, on_gradient, guard, number: int) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    value = loss(model, batch)
    value.backward()
    if on_gradient:
        on_gradient(model, batch)
    largest = math.inf if plan.clip is None else plan.clip
    norm = nn.utils.clip_grad_norm_(model.parameters(), largest)
    value = value.detach()
    guard.add(number, value, norm)
    optimizer.step()
    return value


def _finish_epoch(model, plan: Plan, now: _Progress, validate, clock: _Clock, total: int) -> None:
    """Close the epoch: mean loss, validation, best weights, and whether training is over."""
    now.epoch += 1
    over = now.epoch >= plan.epochs or now.step >= total
    loss_sum = 0.0 if now.loss_sum is None else float(now.loss_sum)
    entry: dict[str, float] = {"epoch": now.epoch, "step": now.step, "loss": loss_sum / max(1, now.index)}
    if validate and (over or now.epoch % plan.validate_every == 0):
        model.eval()
        with torch.no_grad():
            values = validate(model)
        clock.lap(now)
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise NonFinite(f"validation {bad[0]} is not finite after step {now.step}")
        entry |= values
        over |= _remember_best(model, plan, now, values)
    entry["seconds"], entry["train_seconds"] = now.seconds, now.train_seconds
    now.history.append(entry)
    now.index, now.loss_sum, now.done = 0, None, over


def _remember_best(model, plan: Plan, now: _Progress, values: dict[str, float]) -> bool:
    """Keep the weights of the best validation so far; True when patience has run out."""
    if plan.key is None:
        now.best = {"epoch": now.epoch, "value": None, "validation": values, "weights": _copy(model.state_dict())}
        return False
    value = values[plan.key] if plan.higher_is_better else -values[plan.key]
    if now.best is None or value > now.best["value"]:
        now.best = {"epoch": now.epoch, "value": value, "validation": values, "weights": _copy(model.state_dict())}
        now.waited = 0
    else:
        now.waited += 1
    return plan.patience is not None and now.waited >= plan.patience


def _copy(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in weights.items()}


class _Clock:
    """Adds the seconds since the last look to a run's totals, waiting for the device first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start()

    def start(self) -> None:
        synchronize(self.device)
        self.since = time.perf_counter()

    def lap(self, now: _Progress, train: bool = False) -> None:
        synchronize(self.device)
        spent = time.perf_counter() - self.since
        self.since += spent
        now.seconds += spent
        now.train_seconds += spent if train else 0.0


class _FiniteGuard:
    """Collects losses and gradient norms and looks at them every few steps, so that accelerators need not wait."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.pending: list[tuple[int, Tensor]] = []

    def add(self, step: int, loss: Tensor, norm: Tensor) -> None:
        self.pending.append((step, torch.stack([loss.float(), norm.to(loss.device).float()])))
        if len(self.pending) >= self.every:
            self.check()

    def check(self) -> None:
        if not self.pending:
            return
        values = torch.stack([pair for _, pair in self.pending]).cpu()
        for (step, _), (loss, norm) in zip(self.pending, values.tolist(), strict=True):
            for what, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value):
                    raise NonFinite(f"{what} is {value} at step {step}: lower the learning rate or check the inputs")
        self.pending.clear()


class _Run:
    """What is saved: model, optimizer, extras, generators and position."""

    FIELDS = ("epoch", "index", "step", "loss_sum", "history", "best", "waited", "seconds", "train_seconds", "done")

    def __init__(self, model, optimizer, plan: Plan, state: StateFolder, extras: dict[str, Stateful]) -> None:
        self.model, self.optimizer, self.plan, self.state, self.extras = model, optimizer, plan, state, extras

    def save(self, now: _Progress) -> None:
        position = {name: getattr(now, name) for name in self.FIELDS}
        if now.done and now.best is not None:
            position["best"] = {name: value for name, value in now.best.items() if name != "weights"}
        training = {} if now.done else {"optimizer": self.optimizer.state_dict(), "rng": rng_state()}
        extras = {name: extra.state_dict() for name, extra in self.extras.items()}
        self.state.save({"position": position, "model": self.model.state_dict(), "extras": extras} | training)

    def resume(self, device: torch.device) -> _Progress:
        saved = self.state.load()
        if saved is None:
            return _Progress()
        now = _Progress(**saved["position"])
        self.model.load_state_dict(saved["model"])
        for name, extra in self.extras.items():
            extra.load_state_dict(saved["extras"][name])
        if now.loss_sum is not None:
            now.loss_sum = now.loss_sum.to(device)
        if not now.done:
            self.optimizer.load_state_dict(saved["optimizer"])
            restore_rng(saved["rng"])
        return now
