"""Embedded behaviour sequences of `data.behaviours` and the request fields without a history, by a `RequestEncoder`.

Cards onetrans and hyformer split the history into two windows, so the encoder's own `hist` events are not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from auto_research.blocks.request_encoder import CONTEXT_FIELDS, RequestEncoder
from auto_research.data.behaviours import EventWindow
from auto_research.data.requests import RequestBatch

CLOCKS = ("age", "gap")


def window_events(encoder: RequestEncoder, window: EventWindow, clock: str = "age") -> Tensor:
    """Events [R, L, 3w] of a window: item, genres, rating, and the clock's log2 bucket.

    clock: 'age' before the request, or 'gap' to the user's previous event, which does not change from request to
    request.
    """
    if clock not in CLOCKS:
        raise ValueError(f"unknown clock {clock!r}; known: {', '.join(CLOCKS)}")
    seconds = encoder.event_age(window.age if clock == "age" else window.gap)
    return torch.cat([encoder.look_up(window.item), encoder.rating(window.rating), seconds], dim=2)


def request_fields(encoder: RequestEncoder, batch: RequestBatch) -> Tensor:
    """User, context and statistics of every request, [R, 9w] (`RequestFeatures.flat` without embedding a history)."""
    names = (*encoder.user_fields, *CONTEXT_FIELDS)
    fields = [encoder.tables[name](getattr(batch, name)) for name in names]
    return torch.cat([*fields, encoder.user_statistics(batch.user_stats)], dim=1)
