"""Keys and values kept from one request of a user to the next (OneTrans, section 3.5).

What stays valid when events are appended and positions count from the oldest event:

    layer 1   K,V of old tokens: a projection of the token alone
    layer 2   K,V of old tokens: layer-1 rows read all earlier tokens, so they do not change; cut to the new tail K_1
    layer 3+  not valid once the moving tail K_1 drops a key that an old row had read: recomputed over the short tails

Lists here hold one user's tokens without padding. Exact while no sequence has reached its length L.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adapters.onetrans.model import OneTrans
from adapters.onetrans.tokens import Tokens
from auto_research.blocks.request_attention import RequestKeys


class UserCache(NamedTuple):
    """first: k, v of layer 1 [1, H, n, dh] of all n tokens; hidden [1, t, D], second: k, v of layer 2 of the tail t."""

    first: tuple[Tensor, Tensor]
    hidden: Tensor
    second: tuple[Tensor, Tensor]

    def tokens(self) -> int:
        return self.first[0].shape[2]

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.first, self.hidden, *self.second))


def joined(old: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor], most: int | None = None):
    """k, v with the new rows behind the old ones, the last `most` of them."""
    k, v = new if old is None else (torch.cat(pair, dim=2) for pair in zip(old, new, strict=True))
    start = 0 if most is None else max(0, k.shape[2] - most)
    return k[:, :, start:], v[:, :, start:]


def extend(model: OneTrans, cache: UserCache | None, x: Tensor) -> tuple[UserCache, tuple[RequestKeys, ...]]:
    """Append S-tokens x [1, m, D] (m >= 0) to a user's cache, None for a cold start.

    Returns the new cache and the keys of every layer for the user's candidates.
    """
    if model.config.mask == "bidirectional" or len(model.layers) < 2:
        raise ValueError("the cross-request cache needs causal attention and at least two layers")
    one, two, *rest = model.layers
    first = joined(cache and cache.first, one.keys_values(one.norm_attention(x)))
    fresh = one.emit(x[:, max(0, x.shape[1] - one.kept) :], *first, _seen(first))
    second = joined(cache and cache.second, two.keys_values(two.norm_attention(fresh)), one.kept)
    hidden = fresh if cache is None else torch.cat([cache.hidden, fresh], dim=1)
    hidden = hidden[:, max(0, hidden.shape[1] - one.kept) :]
    keys = [RequestKeys(*first, _seen(first)), RequestKeys(*second, _seen(second))]
    x = two.emit(hidden[:, max(0, hidden.shape[1] - two.kept) :], *second, _seen(second)) if two.kept else hidden
    for layer in rest:
        x, found = layer.sequence(x, x.new_ones(x.shape[:2], dtype=torch.bool))
        keys.append(found)
    return UserCache(first, hidden, second), tuple(keys)


def _seen(pair: tuple[Tensor, Tensor]) -> Tensor:
    return torch.ones(1, pair[0].shape[2], dtype=torch.bool, device=pair[0].device)


def listed(tokens: Tokens) -> Tokens:
    """One request's tokens without padding."""
    keep = tokens.mask[0]
    return Tokens(tokens.x[:, keep], tokens.mask[:, keep], tokens.row[:, keep])


def continues(old: Tensor, new: Tensor) -> bool:
    """Whether the rows int64[n] of a cache are the beginning of a later request's rows."""
    return len(old) <= len(new) and bool(torch.equal(old, new[: len(old)]))
