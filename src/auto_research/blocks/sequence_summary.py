"""Sequence summaries: how L behaviour events become three vectors of the event width.

Contract of the slot: `prepare(events [R, L, d], mask [R, L], user [R, 80]) -> (vectors [R, m, d], cache)` once per
request, `score(cache, key [P, d], request_of [P]) -> [P, 3 - m, d]` per candidate; class attribute `shared` = m, `params()`, `flops(pairs, length, requests)`. A vector
that depends on the candidate comes after those that do not.
"""

import torch
from torch import Tensor, nn

from auto_research.blocks.activation_unit import AttentionPooling
from auto_research.blocks.longer import Longer, LongerSmall

RECENT = 8


def masked_mean(events: Tensor, mask: Tensor) -> Tensor:
    """[R, L, d], bool[R, L] -> [R, d]; zero where nothing is valid."""
    share = mask.to(events.dtype) / mask.sum(1, keepdim=True).clamp(min=1)
    return (share.unsqueeze(1) @ events).squeeze(1)


class DefaultSummary(nn.Module):
    """Mean of all events, mean of the last 8, DIN target attention. An empty history gives three zero vectors."""

    shared = 2

    def __init__(
        self,
        event_width: int = 48,
        user_width: int = 80,
        width: int = 64,
        *,
        longest: int = 50,
        unit_hidden: tuple[int, int] = (80, 40),
        **unused,
    ):
        super().__init__()
        self.width = event_width
        self.attention = AttentionPooling(event_width, longest=longest, hidden=unit_hidden)

    def prepare(self, events: Tensor, mask: Tensor, user: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        last = slice(max(0, events.shape[1] - RECENT), None)
        vectors = torch.stack([masked_mean(events, mask), masked_mean(events[:, last], mask[:, last])], dim=1)
        return vectors, (events, mask)

    def score(self, state: tuple[Tensor, Tensor], key: Tensor, request_of: Tensor) -> Tensor:
        events, mask = state
        return self.attention(events, mask, key, request_of).unsqueeze(1)

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, pairs: int, length: int, requests: int = 1) -> int:
        """Forward matrix FLOPs; a request's part is paid once."""
        request = 2 * self.width * (length + min(RECENT, length))
        return requests * request + self.attention.flops(pairs, length, self.width)


SEQUENCE_SUMMARIES = {"default": DefaultSummary, "longer": Longer, "longer_small": LongerSmall}
