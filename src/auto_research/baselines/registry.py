"""Names of the baselines, for documents, tests and measurements; imports none of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

from auto_research.runtime.errors import UnknownName


class Baseline(NamedTuple):
    """task: 'next_item' | 'ctr'.  function: 'module:function', called as f(ctx, *, device, **overrides)."""

    task: str
    function: str
    what: str


BASELINES = {
    "popularity": Baseline("next_item", "auto_research.baselines.popularity:run", "items with most train events"),
    "itemknn": Baseline("next_item", "auto_research.baselines.itemknn:run", "cosine item neighbours, size tuned"),
    "ease": Baseline("next_item", "auto_research.baselines.ease:run", "closed-form linear autoencoder, lambda tuned"),
    "sasrec": Baseline("next_item", "auto_research.baselines.sasrec:run", "causal Transformer with full softmax"),
    "popularity-requests": Baseline(
        "ctr", "auto_research.baselines.popularity:run_requests", "earlier count and like-rate of the item"
    ),
    "bias": Baseline("ctr", "auto_research.baselines.bias:run", "smoothed user and item like-rates"),
    "gbdt": Baseline("ctr", "auto_research.baselines.gbdt:run", "boosted trees on prefix statistics"),
    "din": Baseline("ctr", "auto_research.baselines.din:run", "small DIN: target attention over 50 events"),
    "dcnv2": Baseline("ctr", "auto_research.baselines.dcnv2:run", "three cross layers and an MLP"),
}


def baseline(name: str) -> Callable:
    """The function of a baseline. Raises UnknownName."""
    if name not in BASELINES:
        raise UnknownName(f"unknown baseline '{name}'; known: {', '.join(BASELINES)}")
    module, function = BASELINES[name].function.split(":")
    return getattr(importlib.import_module(module), function)
