"""RankMixer (arXiv:2507.15551): T semantic tokens, parameter-free token mixing, one feed-forward layer per token.

    e  = user | context | user statistics | 3 sequence summaries | candidate | cross          [P, E]
    x_t = W_t e[c(t-1) : ct] + b_t                                                            t = 1..T, c = E / T
    S  = LayerNorm(X + Mix(X)),   X' = LayerNorm(S + Channel(S))                              N blocks
    z  = mean_t x_t,   logit_k = MLP_k(z)                                                     engage, like, love

Everything is written on P flat pairs with request-level work done once per request (R) and gathered by `request_of`.
Tokens are token-major, [T, P, D]. The model is a host of the search: the slots below are names in registries.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.dropout import Dropout
from auto_research.blocks.per_token_ffn import PerTokenFFN, PerTokenSwiGLU, SharedFFN, private_linear
from auto_research.blocks.relu_moe import BALANCE_WEIGHT, PenaltyController, ReluMoE, TopKMoE
from auto_research.blocks.request_encoder import RequestEncoder
from auto_research.blocks.sequence_summary import SEQUENCE_SUMMARIES
from auto_research.blocks.token_mixing import TOKEN_MIXERS, UniMixer
from auto_research.data.requests import RequestBatch

TASKS = 3  # engage, like, love
SUMMARIES = 3


@dataclass(frozen=True)
class RankMixerConfig:
    """Sizes and slots. tokens T, width D (a multiple of T), blocks N, expansion k, history L,
    field: width of an embedded field.

    seq_summary: default | longer | longer_small; token_mixer: rankmixer | unimixer | attention | identity;
    channel: pffn | swiglu_pffn | shared | shared_wide | smoe | smoe_dtsi | smoe_topk; norm: post | pre;
    pooling: mean | concat; tokenizer: private | shared (ablation). heads: H of the mixer, None = its default.
    """

    tokens: int = 8
    width: int = 64
    blocks: int = 2
    expansion: int = 4
    history: int = 50
    seq_summary: str = "default"
    unit_hidden: tuple[int, int] = (80, 40)  # of the DIN attention in the default summary
    token_mixer: str = "rankmixer"
    channel: str = "pffn"
    norm: str = "post"
    pooling: str = "mean"
    tokenizer: str = "private"
    heads: int | None = None
    experts: int = 4
    expert_expansion: int = 2
    rho: float = 0.5
    dropout: float = 0.2
    field: int = 16

    def __post_init__(self):
        if self.width % self.tokens:
            raise ValueError(f"width {self.width} is not a multiple of {self.tokens} tokens")
        for slot, known in SLOTS.items():
            if getattr(self, slot) not in known:
                raise ValueError(f"unknown {slot} {getattr(self, slot)!r}; known: {', '.join(known)}")


def _moe(kind: type, c: RankMixerConfig, **switch: Any) -> nn.Module:
    return kind(c.tokens, c.width, c.experts, c.expert_expansion, c.dropout, **switch)


def _ffn(kind: type, c: RankMixerConfig, **switch: Any) -> nn.Module:
    return kind(c.tokens, c.width, c.expansion, c.dropout, **switch)


CHANNELS = {
    "pffn": partial(_ffn, PerTokenFFN),
    "swiglu_pffn": partial(_ffn, PerTokenSwiGLU),
    "shared": partial(_ffn, SharedFFN),
    "shared_wide": partial(_ffn, SharedFFN, wide=True),
    "smoe": partial(_moe, ReluMoE, two_routers=False),
    "smoe_dtsi": partial(_moe, ReluMoE, two_routers=True),
    "smoe_topk": partial(_moe, TopKMoE),
}
SLOTS = {
    "seq_summary": tuple(SEQUENCE_SUMMARIES),
    "token_mixer": tuple(TOKEN_MIXERS),
    "channel": tuple(CHANNELS),
    "norm": ("post", "pre"),
    "pooling": ("mean", "concat"),
    "tokenizer": ("private", "shared"),
}


class RequestState(NamedTuple):
    """What one request costs once: flat [R, E_r] (all floats before the first pair-level one) and the slot's cache."""

    flat: Tensor
    cache: Any


class RankerInput(nn.Module):
    """RequestBatch -> input vector e [P, E] in semantic order; E = 224 + 3 * 48 = 368 at the defaults."""

    def __init__(self, config: RankMixerConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        self.encoder = RequestEncoder(vocab, item_genres, field=config.field)
        encoder, slot = self.encoder, SEQUENCE_SUMMARIES[config.seq_summary]
        sizes = {"longest": config.history, "unit_hidden": tuple(config.unit_hidden)}
        self.summary = slot(encoder.event_width, encoder.user_width, config.width, **sizes)
        self.width = encoder.request_width + encoder.pair_width + SUMMARIES * encoder.event_width
        self.request_width = encoder.request_width + self.summary.shared * encoder.event_width
        self.dropout = Dropout(config.dropout)

    def prepare(self, batch: RequestBatch) -> RequestState:
        r = self.encoder.request(batch)
        vectors, cache = self.summary.prepare(r.events, r.mask, r.user)  # (R, m, 48)
        return RequestState(torch.cat([r.flat(), vectors.flatten(1)], dim=1), cache)

    def score(self, state: RequestState, batch: RequestBatch) -> Tensor:
        p = self.encoder.pairs(batch)
        vectors = self.summary.score(state.cache, p.key, batch.request_of)  # (P, 3 - m, 48)
        e = torch.cat([state.flat[batch.request_of], vectors.flatten(1), p.candidate, p.cross], dim=1)  # (P, E)
        return self.dropout(e)


class Tokenizer(nn.Module):
    """e [P, E], zero-padded to T c floats, cut into T pieces, each through its own Linear(c, D) -> [T, P, D]."""

    def __init__(self, tokens: int, inputs: int, width: int, shared: bool = False):
        super().__init__()
        self.tokens, self.piece = tokens, -(-inputs // tokens)
        self.padding = self.tokens * self.piece - inputs
        self.weight, self.bias = private_linear(1 if shared else tokens, self.piece, width)

    def forward(self, e: Tensor) -> Tensor:
        pieces = F.pad(e, (0, self.padding)).reshape(len(e), self.tokens, self.piece).transpose(0, 1)  # (T, P, c)
        shape = (self.tokens, -1, -1)
        return torch.baddbmm(self.bias.expand(shape), pieces, self.weight.expand(shape))

    def params(self) -> int:
        return self.weight.numel() + self.bias.numel()

    def flops(self, pairs: int) -> int:
        return 2 * pairs * self.tokens * self.piece * self.weight.shape[2]


class Block(nn.Module):
    """post: S = LN(X + Mix(X)), X' = LN(S + Channel(S)); pre: S = X + Mix(RMS(X)), X' = S + Channel(RMS(S))."""

    def __init__(self, config: RankMixerConfig):
        super().__init__()
        self.post = config.norm == "post"
        self.mixer = TOKEN_MIXERS[config.token_mixer](config.tokens, config.width, config.heads)
        self.channel = CHANNELS[config.channel](config)
        norm = nn.LayerNorm if self.post else nn.RMSNorm
        self.mix_norm, self.channel_norm = norm(config.width), norm(config.width)

    def _channel(self, s: Tensor, route: str) -> Tensor:
        return self.channel(s, route) if isinstance(self.channel, ReluMoE) else self.channel(s)

    def forward(self, x: Tensor, route: str = "infer") -> Tensor:
        if self.post:
            s = self.mix_norm(x + self.mixer(x))  # (T, P, D)
            return self.channel_norm(s + self._channel(s, route))
        s = x + self.mixer(self.mix_norm(x))
        return s + self._channel(self.channel_norm(s), route)

    def params(self) -> int:
        norms = sum(p.numel() for norm in (self.mix_norm, self.channel_norm) for p in norm.parameters())
        return self.mixer.params() + self.channel.params() + norms

    def flops(self, pairs: int) -> int:
        return self.mixer.flops(pairs) + self.channel.flops(pairs)


class TaskHeads(nn.Module):
    """Per task Linear(inputs, hidden)-GELU-Linear(hidden, 1): z [P, inputs] -> logits [P, 3]."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.w1, self.b1 = private_linear(TASKS, inputs, hidden)
        self.w2, self.b2 = private_linear(TASKS, hidden, 1)

    def forward(self, z: Tensor) -> Tensor:
        h = F.gelu(torch.baddbmm(self.b1, z.expand(TASKS, -1, -1), self.w1))  # (3, P, hidden)
        return torch.baddbmm(self.b2, h, self.w2).squeeze(2).t()

    def params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, pairs: int) -> int:
        _, inputs, hidden = self.w1.shape
        return 2 * pairs * TASKS * hidden * (inputs + 1)


class RankMixer(nn.Module):
    """The ranker: model(batch) -> logits [P, 3] for engage, like, love.

    Training uses `training_logits` (two passes for DTSI), `extra_loss` and `after_step`; evaluation and serving gate
    with h_infer only. `prepare` and `score` split a request's part from its candidates' part.
    """

    def __init__(self, config: RankMixerConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        self.config = config
        self.input = RankerInput(config, vocab, item_genres)
        self.tokenizer = Tokenizer(config.tokens, self.input.width, config.width, config.tokenizer == "shared")
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.final_norm = nn.RMSNorm(config.width) if config.norm == "pre" else nn.Identity()
        self.heads = TaskHeads(config.width * (config.tokens if config.pooling == "concat" else 1), config.width)
        self.controller = PenaltyController(config.rho) if self._routed() else None

    def _routed(self) -> list[ReluMoE]:
        return [block.channel for block in self.blocks if isinstance(block.channel, ReluMoE)]

    def prepare(self, batch: RequestBatch) -> RequestState:
        """Request-level part: fields, user statistics and the sequence; independent of the candidates."""
        return self.input.prepare(batch)

    def score(self, state: RequestState, batch: RequestBatch) -> Tensor:
        """Logits [P, 3] of the batch's candidates for prepared requests."""
        return self.after_input(self.input.score(state, batch))

    def after_input(self, e: Tensor) -> Tensor:
        """Input vectors [P, E] -> logits [P, 3]."""
        return self.rank(self.tokenizer(e))

    def rank(self, x: Tensor, route: str = "infer") -> Tensor:
        """Tokens X0 [T, P, D] -> logits [P, 3]."""
        for block in self.blocks:
            x = block(x, route)
        x = self.final_norm(x)
        z = x.mean(0) if self.config.pooling == "mean" else x.transpose(0, 1).flatten(1)  # (P, D) or (P, T D)
        return self.heads(z)

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def training_logits(self, batch: RequestBatch) -> list[Tensor]:
        """One pass, or two for DTSI (h_train, then h_infer) over the same tokens and experts."""
        x = self.tokenizer(self.input.score(self.prepare(batch), batch))
        routes = ("train", "infer") if self.config.channel == "smoe_dtsi" else ("infer",)
        return [self.rank(x, route) for route in routes]

    def extra_loss(self) -> Tensor:
        """lambda * sum over layers of mean ReLU(h_infer), or the load-balance loss of top-k routing."""
        if routed := self._routed():
            return self.controller.weight * torch.stack([layer.take_penalty() for layer in routed]).sum()
        balances = [b.channel.take_balance() for b in self.blocks if isinstance(b.channel, TopKMoE)]
        return BALANCE_WEIGHT * torch.stack(balances).sum() if balances else self.heads.b2.new_zeros(())

    def after_step(self, step: int, total: int) -> None:
        """Controller of lambda, annealing of tau."""
        if routed := self._routed():
            self.controller.update(torch.stack([layer.active for layer in routed]).mean())
        for block in self.blocks:
            if isinstance(block.mixer, UniMixer):
                block.mixer.anneal(step, total)

    def param_groups(self, weight_decay: float) -> list[dict]:
        return decay_by_name(self, weight_decay)

    def active_ratio(self) -> list[list[float]]:
        """Share of open gates per block and token in the last 'infer' pass."""
        return [layer.active.tolist() for layer in self._routed() if layer.active is not None]

    def export(self) -> "RankMixer":
        """Turn this model into its serving form, in place: h_train dropped, active experts gathered, eval mode."""
        for layer in self._routed():
            layer.export()
        return self.eval()

    def dense_params(self) -> int:
        """Parameters behind the input vector: tokenizer, blocks, heads (566,659 at the defaults)."""
        return sum(p.numel() for part in (self.tokenizer, self.blocks, self.heads) for p in part.parameters())

    def flops(self, pairs: int) -> int:
        """Declared forward matrix FLOPs of tokenizer, blocks and heads."""
        return self.tokenizer.flops(pairs) + sum(b.flops(pairs) for b in self.blocks) + self.heads.flops(pairs)


def decay_by_name(model: nn.Module, weight_decay: float) -> list[dict]:
    """Optimizer groups: biases (also those stored [T, 1, D]), norms and slopes do not decay."""
    groups = {True: [], False: []}
    for name, p in model.named_parameters():
        bias = p.ndim < 2 or name.rpartition(".")[2] in ("b1", "b2", "b3", "b12", "bias")
        groups[not bias].append(p)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]
