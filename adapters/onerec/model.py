"""OneRec's session generator: an encoder over the codes of the history, a sparse decoder over those of a session.

    encoder input  [s^1_1 .. s^L'_1, .., s^1_n .. s^L'_n]                    codes of the history
    decoder input  [BOS, s^1_1, .., s^L'_1, BOS, s^1_2, .., BOS, .., s^L'_m]  codes of the session
    L_NTP = - sum_i sum_j log p(s_i^{j+1} | H, s_1 .. s_{i-1}, BOS_i, s_i^{1..j})

Everything but the mixture of experts is the shared encoder-decoder of `auto_research.blocks.sid_models`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapters.onerec.sessions import SessionBatch
from auto_research.blocks.branch_cache import Memory
from auto_research.blocks.semantic_ids import SIDTable, SIDVocab
from auto_research.blocks.sid_models import SIDConfig, SIDSeq2Seq, path_logprob
from auto_research.blocks.sparse_moe import SparseMoE


@dataclass(frozen=True)
class OneRecConfig:
    """Sizes. history: n events.  session: items m that are made one after another (1: point-wise).

    expert_hidden: of every expert, and times `active` of the dense control.  balance: weight of the balance loss.
    """

    width: int = 64
    heads: int = 4
    encoder_layers: int = 2
    layers: int = 2
    hidden: int = 256
    experts: int = 8
    active: int = 2
    expert_hidden: int = 128
    dense: bool = False
    balance: float = 0.01
    dropout: float = 0.1
    history: int = 40
    session: int = 5


class SessionGenerator(SIDSeq2Seq):
    """M(S | H) over the tokens of `vocab`; `item_tokens` int64[n_items + 1, L'] of the table it was built for."""

    def __init__(self, config: OneRecConfig, table: SIDTable, vocab: SIDVocab):
        sizes = SIDConfig(
            width=config.width,
            heads=config.heads,
            encoder_layers=config.encoder_layers,
            layers=config.layers,
            hidden=config.hidden,
            dropout=config.dropout,
            history=config.history,
            items=config.session,
        )
        super().__init__(vocab, sizes)
        self.settings = config
        for block in self.blocks:
            block.ffn = feed_forward(config)
        self.register_buffer("item_tokens", torch.from_numpy(vocab.item_tokens(table)), persistent=False)
        self.register_buffer("item_codes", torch.from_numpy(table.codes), persistent=False)

    def read(self, history: Tensor) -> Memory:
        """Memory of histories int64[B, n], padded with 0 on the left. A history of nothing is read as nothing."""
        tokens = self.item_tokens[history].flatten(1)  # (B, n * L')
        return self.encode(tokens, tokens != self.vocab.pad)

    def spelled(self, session: Tensor) -> Tensor:
        """Codes int64[B, w, m * L'] of sessions int64[B, m]; point-wise models see m branches of one item each."""
        codes = self.item_codes[session]  # (B, m, L')
        return codes if self.settings.session == 1 else codes.flatten(1).unsqueeze(1)

    def codes_of(self, session: Tensor) -> int:
        """m L', the codes of each of sessions int64[.., m]."""
        return session.shape[-1] * self.vocab.levels

    def ntp(self, batch: SessionBatch) -> Tensor:
        """L_NTP float32[B]: negative log-probability of every session, summed over its m L' codes."""
        return -path_logprob(self, self.read(batch.history), self.spelled(batch.session)).sum(1)

    def loss(self, batch: SessionBatch) -> Tensor:
        """L_NTP / (m L'), mean over the sessions, and the weighted balance loss in training."""
        loss = self.ntp(batch).mean() / self.codes_of(batch.session)
        mixtures = self.mixtures() if self.training else []
        return loss + self.settings.balance * sum(m.take_balance() for m in mixtures)

    def mixtures(self) -> list[SparseMoE]:
        return [block.ffn for block in self.blocks if isinstance(block.ffn, SparseMoE)]

    def active_params(self) -> int:
        """Parameters that one token may meet: all without the experts that are not chosen."""
        idle = sum(sum(p.numel() for p in m.parameters()) - m.active_params() for m in self.mixtures())
        return sum(p.numel() for p in self.parameters()) - idle

    def load_entropy(self) -> float:
        """Mean over the layers of the experts' load entropy since the last `reset_load`, 1 = even; 1 for dense."""
        found = [m.load_entropy() for m in self.mixtures()]
        return sum(found) / len(found) if found else 1.0

    def reset_load(self) -> None:
        for mixture in self.mixtures():
            mixture.reset_load()


def feed_forward(config: OneRecConfig) -> nn.Module:
    """The decoder's FFN: sparse mixture, or one FFN of the active width."""
    if not config.dense:
        return SparseMoE(config.width, config.expert_hidden, config.experts, config.active)
    hidden = config.active * config.expert_hidden
    return nn.Sequential(nn.Linear(config.width, hidden), nn.ReLU(), nn.Linear(hidden, config.width))
