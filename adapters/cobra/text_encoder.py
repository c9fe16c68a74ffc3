"""The trainable text encoder: states of word pieces in, one dense vector per item out (COBRA, section 3.2).

The states are frozen and stored, or made anew from the word pieces by a pretrained encoder that is trained with the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.dropout import Dropout

START = 0.08  # spread of the entries of v


class TextBatch(NamedTuple):
    """Word pieces of N items: rows int64[n] of the packed states, place int64[n] of each in a table [N, T], mask bool[N, T]."""

    rows: Tensor
    place: Tensor
    mask: Tensor

    def to(self, device: torch.device) -> TextBatch:
        return TextBatch(*(tensor.to(device) for tensor in self))


class PackedTexts:
    """Word-piece states of a catalogue without padding: states float32[all pieces, D], starts int64[n_items + 2].

    pieces: int64[n_items + 1, T] of the same mask, the vocabulary entries themselves, for an encoder that is trained.
    """

    def __init__(self, states: np.ndarray, mask: np.ndarray, pieces: np.ndarray | None = None):
        self.states = torch.from_numpy(np.ascontiguousarray(states[mask], dtype=np.float32))
        self.pieces = None if pieces is None else torch.from_numpy(pieces[mask])
        self.starts = np.concatenate([[0], np.cumsum(mask.sum(1))]).astype(np.int64)

    @property
    def n_items(self) -> int:
        return len(self.starts) - 2

    def batch(self, items: np.ndarray) -> TextBatch:
        """Pieces of distinct items int64[N]; the padding item 0 has none. Known sizes, so no device waits for them."""
        first, length = self.starts[items], self.starts[items + 1] - self.starts[items]
        owner = np.repeat(np.arange(len(items)), length)
        column = np.arange(len(owner)) - np.repeat(np.cumsum(length) - length, length)
        longest = max(1, int(length.max(initial=0)))
        mask = np.arange(longest) < length[:, None]
        return TextBatch(*map(torch.from_numpy, (first[owner] + column, owner * longest + column, mask)))


class TextEncoder(nn.Module):
    """v_i = W_o Enc([CLS; W_p H_i])_CLS with one pre-norm Transformer layer.

    Only the state of CLS is read, so only its query, its residual and its feed-forward are computed.

    pretrained: transformers encoder that makes H_i from the word pieces, trained with the rest; None: the stored states.
    """

    def __init__(
        self,
        texts: PackedTexts,
        width: int,
        heads: int,
        hidden: int,
        dropout: float,
        pretrained: nn.Module | None = None,
    ):
        super().__init__()
        self.heads, self.pretrained = heads, pretrained
        self.register_buffer("states", texts.states if pretrained is None else texts.pieces, persistent=False)
        self.project = nn.Linear(texts.states.shape[1] if pretrained is None else pretrained.config.hidden_size, width)
        self.cls = nn.Parameter(torch.randn(width) * 0.02)
        self.norm_attention, self.norm_ffn, self.norm = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.mix = nn.Linear(width, width)
        self.ffn = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.out = nn.Linear(width, width)
        self.dropout = Dropout(dropout)
        nn.init.normal_(self.out.weight, std=START / width**0.5)  # as large as the tables its output is added to
        nn.init.zeros_(self.out.bias)  # a bias as large would be shared by all items, and a frozen encoder keeps it

    def read(self, text: TextBatch) -> Tensor:
        """H float[n, D_H] of the packed pieces."""
        if self.pretrained is None:
            return self.states[text.rows]
        pieces = self.states.new_zeros(text.mask.numel()).index_copy(0, text.place, self.states[text.rows])
        mask = text.mask.clone()
        mask[:, 0] = True  # the padding item has no piece, and a row without any has no softmax
        read = self.pretrained(input_ids=pieces.view_as(text.mask), attention_mask=mask.long()).last_hidden_state
        return read.flatten(0, 1)[text.place]

    def forward(self, text: TextBatch) -> Tensor:
        """v float[N, D]."""
        count, longest = text.mask.shape
        pieces = self.project(self.read(text))  # (n, D)
        seen = self.norm_attention(torch.cat([self.cls.unsqueeze(0), pieces]))
        memory = self.key_value(seen)  # (1 + n, 2 D); padding comes behind, so that it costs nothing before
        padded = memory.new_zeros(count * longest, memory.shape[1]).index_copy(0, text.place, memory[1:])
        memory = torch.cat([memory[:1].expand(count, 1, -1), padded.unflatten(0, (count, longest))], dim=1)
        mask = F.pad(text.mask, (1, 0), value=True)[:, None, None]
        k, v = memory.unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (N, H, 1 + T, D/H)
        q = self.query(seen[0]).view(self.heads, 1, -1).expand(count, -1, -1, -1)
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).flatten(1)
        x = self.cls + self.dropout(self.mix(read.to(pieces.dtype)))
        x = x + self.dropout(self.ffn(self.norm_ffn(x)))
        return self.out(self.norm(x))
