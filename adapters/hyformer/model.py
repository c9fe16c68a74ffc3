"""HyFormer (arXiv:2601.12681): a few global query tokens alternate between reading the sequences and mixing with fields.

    F_m = W_m f_m + b_m                                           M non-sequence tokens, the candidate among them
    H_s^0 = [null; W_s ev + b_s],   g = [F_1; ..; F_M; mean(H_1^0); ..; mean(H_S^0)],   Q_{s,n}^0 = MLP_{s,n}(g)
    H_s^l = Enc_s^l(H_s^{l-1}),   K_s^l = H_s^l W_K,  V_s^l = H_s^l W_V                      never sees the candidate
    Qd_s^l = Q_s^{l-1} + MHA(RMSNorm(Q_s^{l-1}), K_s^l, V_s^l) W_O                                  query decoding
    Z = [Qd_1; ..; Qd_S; F],   Z' = Z + PFFN(RMSNorm(Mix(Z)))                                       query boosting
    logits = MLP(flatten(Z^last))                                                              engage, like, love

Sequences are [R, L, D], once per request; tokens are token-major, [T, P, D], T = N + M, one set per pair. The slots
below are names in registries, as in a host of the search.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adapters.hyformer.operators import (
    AttentionEncoder,
    Decoder,
    FlatHead,
    GatedDecoder,
    GeneratedQueries,
    LinearDecoder,
    LongerReducer,
    MeanHead,
    NoReducer,
    SemanticTokens,
    SplitTokens,
    StaticQueries,
    SwiGLUEncoder,
)
from auto_research.blocks.behaviour_events import request_fields, window_events
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.per_token_ffn import PerTokenFFN, SharedFFN
from auto_research.blocks.relu_moe import PenaltyController, ReluMoE
from auto_research.blocks.request_attention import NullEvent
from auto_research.blocks.request_encoder import RequestEncoder
from auto_research.blocks.request_groups import request_groups
from auto_research.blocks.sequence_summary import masked_mean
from auto_research.blocks.token_mixing import TOKEN_MIXERS, UniMixer
from auto_research.data.behaviours import BehaviourBatch

TASKS = 3  # engage, like, love
SEQUENCES = ("liked", "other")
EXPERTS, EXPERT_EXPANSION = 4, 1


@dataclass(frozen=True)
class HyFormerConfig:
    """Sizes, slots and ablation switches.

    tokens M, queries N_q per sequence, width D (a multiple of T = 2 N_q + M for the shuffle), layers, heads of attention,
    expansion of every feed-forward layer, history L of each sequence, head_hidden, field: width of an embedded field.
    boosting: mix | identity (Z' = Z); sequences: split | merged (all queries read both); keys: layerwise | shared (K, V of
    the first layer for all layers); candidate: token | dot (only in a final dot product).
    """

    tokens: int = 4
    queries: int = 2
    width: int = 64
    layers: int = 3
    heads: int = 4
    expansion: int = 2
    head_hidden: int = 128
    history: int = 50
    dropout: float = 0.2
    field: int = 16
    ns_tokenizer: str = "semantic"
    sequence_reducer: str = "identity"
    query_generator: str = "mlp"
    kv_encoder: str = "swiglu"
    query_decoder: str = "mha"
    token_mixer: str = "shuffle"
    channel: str = "pffn"
    head: str = "flatten"
    mixer_heads: int | None = None
    rho: float = 0.5
    boosting: str = "mix"
    sequences: str = "split"
    keys: str = "layerwise"
    candidate: str = "token"

    def __post_init__(self):
        for slot, known in (SLOTS | SWITCHES).items():
            if getattr(self, slot) not in known:
                raise ValueError(f"unknown {slot} {getattr(self, slot)!r}; known: {', '.join(known)}")
        if self.width % self.all_tokens and self.token_mixer == "shuffle":
            raise ValueError(f"width {self.width} is not a multiple of T = {self.all_tokens} tokens")

    @property
    def all_queries(self) -> int:
        """N."""
        return len(SEQUENCES) * self.queries

    @property
    def all_tokens(self) -> int:
        """T = N + M."""
        return self.all_queries + self.tokens


def _encoder(kind: type, **switch: Any):
    return lambda c: kind(c.width, c.heads, c.expansion * c.width, c.dropout, **switch)


def _generator(kind: type, **switch: Any):
    return lambda c: kind(c.all_queries, c.tokens, len(SEQUENCES), c.width, **switch)


NS_TOKENIZERS = {"semantic": SemanticTokens, "auto_split": SplitTokens}
SEQUENCE_REDUCERS = {"identity": NoReducer, "longer": LongerReducer}
QUERY_GENERATORS = {
    "mlp": _generator(GeneratedQueries),
    "no_mean": _generator(GeneratedQueries, mean=False),
    "static": _generator(StaticQueries),
}
KV_ENCODERS = {
    "swiglu": _encoder(SwiGLUEncoder),
    "full": _encoder(AttentionEncoder),
    "longer": _encoder(AttentionEncoder, survivors=16),
}
QUERY_DECODERS = {"mha": Decoder, "gated": GatedDecoder, "linear": LinearDecoder}
MIXERS = {"shuffle" if name == "rankmixer" else name: kind for name, kind in TOKEN_MIXERS.items()}
CHANNELS = {
    "pffn": lambda c: PerTokenFFN(c.all_tokens, c.width, c.expansion, c.dropout),
    "shared": lambda c: SharedFFN(c.all_tokens, c.width, c.expansion, c.dropout),
    "smoe": lambda c: ReluMoE(c.all_tokens, c.width, EXPERTS, EXPERT_EXPANSION, c.dropout, two_routers=False),
}
HEADS = {"flatten": FlatHead, "mean": MeanHead}
SLOTS = {
    "ns_tokenizer": tuple(NS_TOKENIZERS),
    "sequence_reducer": tuple(SEQUENCE_REDUCERS),
    "query_generator": tuple(QUERY_GENERATORS),
    "kv_encoder": tuple(KV_ENCODERS),
    "query_decoder": tuple(QUERY_DECODERS),
    "token_mixer": tuple(MIXERS),
    "channel": tuple(CHANNELS),
    "head": tuple(HEADS),
}
SWITCHES = {
    "boosting": ("mix", "identity"),
    "sequences": ("split", "merged"),
    "keys": ("layerwise", "shared"),
    "candidate": ("token", "dot"),
}


class RequestState(NamedTuple):
    """What a request costs once: field groups [R, w], means [R, S D], and per layer the K,V of every sequence."""

    fields: list[Tensor]
    means: Tensor
    keys: list[list[NamedTuple]]


class Inputs(nn.Module):
    """Fields and sequences of a batch, and the first tokens Z^0 [T, P, D] (queries first)."""

    def __init__(self, config: HyFormerConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        self.config, self.encoder = config, RequestEncoder(vocab, item_genres, field=config.field)
        e, width = self.encoder, config.width
        self.request_widths = (e.user_width, e.request_width - e.user_width)  # user 80, context and statistics 64
        self.pair_widths = (4 * e.field, e.field)  # candidate 64, cross 16
        self.dropout = Dropout(config.dropout)
        self.events = nn.ModuleList(nn.Linear(e.event_width, width) for _ in SEQUENCES)
        self.nulls = nn.ModuleList(NullEvent(width) for _ in SEQUENCES)
        self.reducers = nn.ModuleList(SEQUENCE_REDUCERS[config.sequence_reducer](width) for _ in SEQUENCES)
        if config.candidate == "token":
            self.tokenizer = NS_TOKENIZERS[config.ns_tokenizer](
                self.request_widths, self.pair_widths, config.tokens, width
            )
        else:
            self.tokenizer = SplitTokens(self.request_widths, (), config.tokens, width)
        self.generator = QUERY_GENERATORS[config.query_generator](config)

    def fields(self, batch: BehaviourBatch) -> list[Tensor]:
        flat = self.dropout(request_fields(self.encoder, batch))
        return list(flat.split(self.request_widths, dim=1))

    def sequences(self, batch: BehaviourBatch) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Means of H_s^0 without the null event, [R, S D], and (H_s^0 [R, 1 + L', D], mask) of every sequence."""
        means, rows = [], []
        parts = zip(SEQUENCES, self.events, self.nulls, self.reducers, strict=True)
        for name, project, null, reducer in parts:
            window = batch.window(name)
            h = project(window_events(self.encoder, window))  # (R, L, D)
            means.append(masked_mean(h, window.mask))
            rows.append(reducer(*null(h, window.mask)))
        return torch.cat(means, dim=1), rows

    def candidate(self, batch: BehaviourBatch) -> list[Tensor]:
        pair = self.encoder.pairs(batch)
        return [self.dropout(pair.candidate), self.dropout(pair.cross)]

    def start(self, fields: list[Tensor], means: Tensor, pair: list[Tensor], request_of: Tensor) -> Tensor:
        f = self.tokenizer(fields, pair, request_of)  # (M, P, D)
        return torch.cat([self.generator(f, means, request_of), f])

    def params(self) -> int:
        """Parameters behind the embedded fields and events."""
        return sum(p.numel() for p in self.parameters()) - sum(p.numel() for p in self.encoder.parameters())

    def flops(self, pairs: int, requests: int = 1) -> int:
        length, width, event = self.config.history, self.config.width, self.encoder.event_width
        rows = 2 * length * width * (event + 1) + self.reducers[0].flops(length)  # the 1: the mean
        shared = requests * len(SEQUENCES) * rows
        return shared + self.tokenizer.flops(pairs, requests) + self.generator.flops(pairs, requests)


class Booster(nn.Module):
    """Z + Channel(RMSNorm(Mix(Z))) over [T, P, D]; boosting 'identity' gives Z back."""

    def __init__(self, config: HyFormerConfig):
        super().__init__()
        self.active = config.boosting == "mix"
        if self.active:
            self.mixer = MIXERS[config.token_mixer](config.all_tokens, config.width, config.mixer_heads)
            self.norm, self.channel = nn.RMSNorm(config.width), CHANNELS[config.channel](config)

    def forward(self, z: Tensor) -> Tensor:
        return z + self.channel(self.norm(self.mixer(z))) if self.active else z

    def flops(self, pairs: int) -> int:
        return self.mixer.flops(pairs) + self.channel.flops(pairs) if self.active else 0


class Layer(nn.Module):
    """One layer: `encode` once per request, forward(z, keys, request_of) once per pair.

    own_keys: False reads the keys of an earlier layer (ablation keys='shared') and has no encoder.
    """

    def __init__(self, config: HyFormerConfig, own_keys: bool = True):
        super().__init__()
        self.cut, self.merge = config.all_queries, config.sequences == "merged"
        self.encoders = nn.ModuleList(KV_ENCODERS[config.kv_encoder](config) for _ in SEQUENCES if own_keys)
        decoder = QUERY_DECODERS[config.query_decoder]
        self.decoders = nn.ModuleList(decoder(config.width, config.heads) for _ in SEQUENCES)
        if not own_keys:
            for layer in self.decoders:
                layer.read.kv = nn.Identity()
        self.booster = Booster(config)

    def encode(self, rows: list[tuple[Tensor, Tensor]]) -> tuple[list[tuple[Tensor, Tensor]], list[NamedTuple]]:
        """(H_s^{l-1}, mask) of every sequence -> (H_s^l, mask), and the keys that its queries read."""
        rows = [encoder(*row) for encoder, row in zip(self.encoders, rows, strict=True)]
        keys = [decoder.keys_values(*row) for decoder, row in zip(self.decoders, rows, strict=True)]
        return rows, [self.decoders[0].merged(keys)] * len(keys) if self.merge else keys

    def decode(self, z: Tensor, keys: list[NamedTuple], request_of: Tensor, groups=None) -> Tensor:
        """The decoded queries, [N, P, D]."""
        queries = z[: self.cut].chunk(len(keys))
        parts = zip(self.decoders, queries, keys, strict=True)
        return torch.cat([decoder(q, part, request_of, groups) for decoder, q, part in parts])

    def forward(self, z: Tensor, keys: list[NamedTuple], request_of: Tensor, groups=None) -> Tensor:
        return self.booster(torch.cat([self.decode(z, keys, request_of, groups), z[self.cut :]]))

    def flops(self, pairs: int, rows: int, requests: int = 1) -> tuple[int, int]:
        """Forward matrix FLOPs over sequences of `rows` rows each, and the rows that the next layer gets."""
        out = self.encoders[0].length(rows) if self.encoders else rows
        count, kept = len(SEQUENCES), out if self.encoders else 0
        encode = sum(requests * encoder.flops(rows) for encoder in self.encoders)
        read, queries = out * (count if self.merge else 1), self.cut // count
        decode = sum(decoder.flops(pairs, queries, kept, read, requests) for decoder in self.decoders)
        return encode + decode + self.booster.flops(pairs), out


class DotHead(nn.Module):
    """The shortcut: a request vector per task, from the final tokens, times the candidate; [R, D] and [P, D] -> [P, 3]."""

    def __init__(self, inputs: int, config: HyFormerConfig):
        super().__init__()
        self.width = config.width
        self.request = HEADS[config.head](
            config.all_tokens, config.width, config.head_hidden, TASKS * config.width, config.dropout
        )
        self.candidate, self.bias = nn.Linear(inputs, config.width), nn.Parameter(torch.zeros(TASKS))

    def forward(self, z: Tensor, pair: list[Tensor], request_of: Tensor) -> Tensor:
        request = self.request(z).unflatten(1, (TASKS, -1))[request_of]  # (P, 3, D)
        candidate = self.candidate(torch.cat(pair, dim=1)).unsqueeze(1)
        return (request * candidate).sum(2) * self.width**-0.5 + self.bias


class HyFormer(nn.Module):
    """model(batch) -> logits [P, 3]. `prepare` is the request's part and the serving cache, `score` the candidates'."""

    def __init__(self, config: HyFormerConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        self.config = config
        self.inputs = Inputs(config, vocab, torch.as_tensor(item_genres))
        self.layers = nn.ModuleList(Layer(config, i == 0 or config.keys == "layerwise") for i in range(config.layers))
        sizes = (config.all_tokens, config.width, config.head_hidden, TASKS, config.dropout)
        late = config.candidate == "dot"
        self.head = DotHead(sum(self.inputs.pair_widths), config) if late else HEADS[config.head](*sizes)
        self.controller = PenaltyController(config.rho) if self._routed() else None

    def _routed(self) -> list[ReluMoE]:
        channels = [layer.booster.channel for layer in self.layers if layer.booster.active]
        return [channel for channel in channels if isinstance(channel, ReluMoE)]

    def prepare(self, batch: BehaviourBatch) -> RequestState:
        means, rows = self.inputs.sequences(batch)
        keys: list[list[NamedTuple]] = []
        for layer in self.layers:
            if layer.encoders:
                rows, own = layer.encode(rows)
            keys.append(own)
        return RequestState(self.inputs.fields(batch), means, keys)

    def score(self, state: RequestState, batch: BehaviourBatch) -> Tensor:
        pair = self.inputs.candidate(batch)
        if self.config.candidate == "dot":  # the tokens know no candidate: one set per request
            own = torch.arange(len(state.means), device=state.means.device)
            return self.head(self.tokens(state, [], own), pair, batch.request_of)
        return self.head(self.tokens(state, pair, batch.request_of))

    def tokens(self, state: RequestState, pair: list[Tensor], request_of: Tensor) -> Tensor:
        """Final tokens [T, P, D]."""
        z = self.inputs.start(state.fields, state.means, pair, request_of)
        groups = request_groups(request_of, len(state.means))
        for layer, keys in zip(self.layers, state.keys, strict=True):
            z = layer(z, keys, request_of, groups)
        return z

    def forward(self, batch: BehaviourBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def extra_loss(self) -> Tensor:
        """The sparsity penalty of routed experts, else 0."""
        if routed := self._routed():
            return self.controller.weight * torch.stack([layer.take_penalty() for layer in routed]).sum()
        return next(self.head.parameters()).new_zeros(())

    def after_step(self, step: int, total: int) -> None:
        """Penalty controller, annealing of tau."""
        if routed := self._routed():
            self.controller.update(torch.stack([layer.active for layer in routed]).mean())
        for layer in self.layers:
            if layer.booster.active and isinstance(layer.booster.mixer, UniMixer):
                layer.booster.mixer.anneal(step, total)

    def param_groups(self, weight_decay: float) -> list[dict]:
        return decay_groups(self, weight_decay)

    def dense_params(self) -> int:
        """Parameters behind the embedded fields and events."""
        behind = [p for part in (self.layers, self.head) for p in part.parameters()]
        return self.inputs.params() + sum(p.numel() for p in behind)

    def flops(self, pairs: int, requests: int = 1) -> int:
        """Forward matrix FLOPs behind the embedded fields and events, histories full (not for candidate='dot')."""
        total = self.inputs.flops(pairs, requests) + self.head.flops(pairs)
        rows = 1 + self.inputs.reducers[0].length(self.config.history)
        for layer in self.layers:
            cost, rows = layer.flops(pairs, rows, requests)
            total += cost
        return total


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Optimizer groups: biases (also those stored [T, 1, D]), norms and the null event do not decay."""
    decayed, kept = [], []
    for name, p in model.named_parameters():
        last = name.rpartition(".")[2]
        (kept if p.ndim < 2 or last in ("b1", "b2", "bias") else decayed).append(p)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
