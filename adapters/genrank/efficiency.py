"""Organisation by bias: what a training pass and a served request cost at several history lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from adapters.genrank.model import GenRank
from adapters.genrank.windows import Windows, WindowTable
from auto_research.evaluate.serving import TIMED, median_seconds
from auto_research.experiment.studies import ONLY, Study, study
from auto_research.metrics.cost import flops_of, saved_bytes
from auto_research.train.ctr import training_loss

HISTORIES = (64, 128, 256)
CANDIDATES = 128
WINDOWS = 8
KERNELS = {"kernel chosen by the library": nullcontext, "eager": lambda: sdpa_kernel(SDPBackend.MATH)}


def longest_windows(table: WindowTable, length: int, count: int) -> Windows:
    """The last `length` train events of the users with most of them, cut at seconds; the second half is scored."""
    rows = np.flatnonzero(table.index.train_row)
    users = table.interactions.user[rows]
    events = np.bincount(users)
    chosen = np.argsort(-events, kind="stable")[:count]
    found = []
    for user in sorted(chosen[events[chosen] > 0].tolist()):
        own = rows[users == user]
        start, half = max(int(own[0]), int(own[-1]) + 1 - length), int(own[-1]) + 1 - length // 2
        requests = table.row_request[[start, max(half, start)]]
        start, half = (int(table.index.start[r]) for r in requests)
        found.append((start, int(own[-1]) + 1, half))
    return Windows(*np.array(found, dtype=np.int64).T)


def efficiency_studies(
    model: GenRank,
    table: WindowTable,
    *,
    device: torch.device,
    histories: Sequence[int] = HISTORIES,
    timed: int = TIMED,
) -> dict[str, Study]:
    """Studies over history length: tokens and FLOPs of a window's forward pass, bytes kept for backward, milliseconds of
    forward and backward of 8 windows and of a request with 128 candidates. The model's weights do not change.

    The clock runs twice, with whatever kernel `scaled_dot_product_attention` picks and with its plain matrix products: an
    explicit additive bias takes some fused kernels off the table. The choice touches the event rows (and candidates that
    read each other); isolated candidates have matrix products of their own.
    """
    points: dict[str, list[tuple[int, float]]] = {name: [] for name in ("tokens", "flops", "bytes")}
    clocks: dict[str, dict[str, list[tuple[int, float]]]] = {
        name: {kernel: [] for kernel in KERNELS} for name in ("step", "request")
    }

    def clock(name: str, history: int, work: Callable[[], object]) -> None:
        for kernel, chosen in KERNELS.items():
            with chosen():
                clocks[name][kernel].append((history, 1e3 * median_seconds(work, device, timed=timed)))

    for history in histories:
        windows = longest_windows(table, history, WINDOWS)
        batch = table.window_batch(windows, negatives=3, rng=np.random.default_rng(0)).to(device)

        def step(batch=batch) -> None:
            training_loss(model, batch).backward()
            model.zero_grad(set_to_none=True)

        model.train()
        clock("step", history, step)
        model.eval()  # no dropout masks among the kept bytes
        points["bytes"].append((history, saved_bytes(lambda batch=batch: model(batch))))
        with torch.no_grad():
            points["tokens"].append((history, model.tokens(batch) / len(windows)))
            points["flops"].append((history, flops_of(lambda batch=batch: model(batch)) / len(windows)))
            items = np.arange(CANDIDATES) % table.interactions.n_items + 1
            request = table.longest_request(items, history).to(device)
            clock("request", history, lambda request=request: model(request))
    x = "events in the history"
    named = {
        "tokens_per_window": ("tokens of a window and its candidates", "tokens"),
        "window_flops": ("FLOPs of a window, forward", "flops"),
        "kept_bytes": ("bytes kept for backward, 8 windows", "bytes"),
    }
    timed_studies = {
        "train_step_ms": ("milliseconds forward and backward, 8 windows", "step"),
        "request_ms": ("milliseconds, 128 candidates", "request"),
    }
    counted = {name: study(x, y, {ONLY: points[key]}) for name, (y, key) in named.items()}
    return counted | {name: study(x, y, clocks[key]) for name, (y, key) in timed_studies.items()}
