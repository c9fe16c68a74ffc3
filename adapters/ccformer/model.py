"""CCFormer (arXiv:2607.28070): fields as separate streams, progressive compression of old history, many targets in one pass.

    S_f^0 = X_f W_f, f in {id, content, action}                                     [F, R, L, d], once per request
    cross-field -> Compress -> C + Mix(RMSNorm(C))                                  streams.py, per layer
    G_m <- G_m + sum_f softmax(N(G_m) W_f^q (N_f W_f^k)^T / sqrt(d)) N_f W_f^v W_f^o      N_f = RMSNorm(S_f)
    G <- G + PFFN(Shuffle(RMSNorm(G)))                                              M = 4 global tokens per target
    logits = W_k SiLU(W flatten(G))                                                 engage, like, love

Streams are field-major and padded positions are 0. Global tokens are token-major, G [M, P, d]: the targets of a request are
P flat pairs that never see each other, and streams never read G, so one pass of S serves every target.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.ccformer.streams import FieldLinear, StreamLayer, compressed_length, unit_rms
from adapters.ccformer.titles import TitledEncoder
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.per_token_ffn import PerTokenFFN
from auto_research.blocks.request_attention import request_attention
from auto_research.blocks.request_encoder import embedding
from auto_research.blocks.request_groups import Group, request_groups
from auto_research.blocks.token_mixing import HeadShuffle
from auto_research.data.behaviours import BehaviourBatch
from auto_research.data.prefix import LOG_BUCKETS
from auto_research.runtime.precision import float32_region

TASKS = 3  # engage, like, love
FIELDS = ("id", "content", "action")
GLOBALS = 4  # target id, target content, user profile, context with statistics and cross
LIKE = 1
PAIR_COLUMNS = (
    "request_of",
    "item",
    "decade",
    "popularity",
    "cross",
    "engage",
    "like",
    "love",
    "rated",
    "user_of_pair",
)


@dataclass(frozen=True)
class CCFormerConfig:
    """Sizes: history L, recent R (positions never merged), width d, layers, heads of the cross-field attention, tower.

    Ablations. streams: fields | sum (one stream of width d) | wide (one of width F d, feed-forward sized to the same
    parameters); projections: private | shared (cross-field); compression: old | all (recent positions too) | none |
    truncate (the newest events only, as many as `old` ends with); mix: conv | attention; read: all | id;
    targets: together | alone (one forward per target); tasks: all | like.
    """

    history: int = 64
    recent: int = 16
    width: int = 32
    layers: int = 3
    heads: int = 4
    field: int = 16
    tower: int = 128
    expansion: int = 4
    dropout: float = 0.2
    streams: str = "fields"
    projections: str = "private"
    compression: str = "old"
    mix: str = "conv"
    read: str = "all"
    targets: str = "together"
    tasks: str = "all"

    def __post_init__(self) -> None:
        known = {
            "streams": ("fields", "sum", "wide"),
            "projections": ("private", "shared"),
            "compression": ("old", "all", "none", "truncate"),
            "mix": ("conv", "attention"),
            "read": ("all", "id"),
            "targets": ("together", "alone"),
            "tasks": ("all", "like"),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"ccformer: {name} {getattr(self, name)!r} is not one of {', '.join(values)}")

    @property
    def stream_count(self) -> int:
        return len(FIELDS) if self.streams == "fields" else 1

    @property
    def stream_width(self) -> int:
        return self.width * (len(FIELDS) if self.streams == "wide" else 1)

    @property
    def hidden(self) -> int:
        """SwiGLU width of Mix, 2 d; `wide` also gets the parameters of the cross-field part it has no use for."""
        d, count = self.width, len(FIELDS)
        if self.streams != "wide":
            return 2 * d
        return round(count * (6 * d * d + 4 * d * d + 2 * d) / (3 * count * d))

    def lengths(self, history: int | None = None) -> list[int]:
        """Positions that enter layer 1, and those that leave every layer (64, 40, 28, 22)."""
        history = self.history if history is None else history
        if self.compression == "truncate":
            kept = replace(self, compression="old").lengths(history)[-1]
            return [kept] * (self.layers + 1)
        lengths = [history]
        for _ in range(self.layers):
            last = lengths[-1]
            lengths.append(last if self.merged_before is None else compressed_length(last, self.merged_before))
        return lengths

    @property
    def merged_before(self) -> int | None:
        """Newest positions that Compress leaves alone; None without compression."""
        return {"old": self.recent, "all": 0}.get(self.compression)


def _stream_layer(c: CCFormerConfig) -> StreamLayer:
    return StreamLayer(
        c.stream_count,
        c.stream_width,
        heads=c.heads,
        recent=c.merged_before,
        hidden=c.hidden,
        mix=c.mix,
        cross=c.streams == "fields",
        shared=c.projections == "shared",
        dropout=c.dropout,
    )


class FieldTokenizer(nn.Module):
    """Events -> streams; fields of a target -> global tokens. Fields are never summed at the input.

    In large batches [genres; title] of the whole vocabulary is projected once and looked up, which is the same Linear.
    """

    def __init__(self, c: CCFormerConfig, encoder: TitledEncoder):
        super().__init__()
        w, out, d, titles = c.field, c.stream_width, c.width, encoder.titles.shape[1]
        self.streams = c.streams
        self.id, self.action = nn.Linear(w, out, bias=False), nn.Linear(w, out, bias=False)
        self.content = nn.Linear(w + titles, out, bias=False)  # Linear(400, d)
        self.gap = embedding(LOG_BUCKETS, w // 2)
        self.target_id, self.user = nn.Linear(w, d), nn.Linear(5 * w, d)
        self.target_content, self.target_rest = nn.Linear(w + titles, d), nn.Linear(2 * w, d, bias=False)  # 432 floats
        self.context, self.cross = nn.Linear(4 * w, d), nn.Linear(w, d, bias=False)  # 80 floats
        for layer in (self.target_id, self.target_content):  # else larger than what an embedding gives at the start
            nn.init.zeros_(layer.bias)
        self.dropout = Dropout(c.dropout)

    def events(self, batch: BehaviourBatch, encoder: TitledEncoder) -> Tensor:
        """S^0 [F, R, L, d] (one field when streams are fused); 0 at padding."""
        item, content = self.id(encoder.item(batch.hist_item)), encoder.projected(self.content, batch.hist_item)
        action = self.action(torch.cat([encoder.rating(batch.hist_rating), self.gap(batch.hist_gap)], dim=2))
        tokens = [item, content, action]  # (R, L, d) each
        s = torch.stack(tokens) if self.streams == "fields" else sum(tokens).unsqueeze(0)
        return self.dropout(s) * batch.hist_mask.unsqueeze(2).to(s.dtype)

    def request(self, batch: BehaviourBatch, encoder: TitledEncoder) -> tuple[Tensor, Tensor]:
        """The request's share of its global tokens: user [R, d], context and statistics [R, d]."""
        user = torch.cat([encoder.tables[name](getattr(batch, name)) for name in encoder.user_fields], dim=1)
        context = [encoder.tables[name](getattr(batch, name)) for name in ("hour", "weekday", "gap")]
        context = torch.cat([*context, encoder.user_statistics(batch.user_stats)], dim=1)
        return self.user(self.dropout(user)), self.context(self.dropout(context))

    def targets(self, user: Tensor, context: Tensor, batch: BehaviourBatch, encoder: TitledEncoder) -> Tensor:
        """G^0 [M, P, d]."""
        item = self.target_id(self.dropout(encoder.item(batch.item)))
        rest = torch.cat([encoder.decade(batch.decade), encoder.popularity(batch.popularity)], dim=1)
        content = self.dropout(encoder.projected(self.target_content, batch.item)) + self.target_rest(
            self.dropout(rest)
        )
        cross = self.cross(self.dropout(encoder.cross(batch.cross)))
        r = batch.request_of
        return torch.stack([item, content, user[r], context[r] + cross])


class FieldReader(nn.Module):
    """Every global token reads every stream with the stream's own projections; the reads are added.

    A stream without a visible position contributes 0. One softmax per (token, stream); keys are never copied per target.
    """

    def __init__(self, streams: int, stream_width: int, width: int, readable: int):
        super().__init__()
        self.readable = readable
        self.q = nn.Linear(width, readable * width, bias=False)
        self.kv = FieldLinear(readable, stream_width, 2 * width, bias=False)
        self.out = nn.Linear(readable * width, width, bias=False)

    def keys_values(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [R, F, N, d]: what a request's targets read in this layer."""
        _, requests, length, _ = s.shape
        kv = self.kv(unit_rms(s[: self.readable]).flatten(1, 2)).unflatten(1, (requests, length))  # (F, R, N, 2d)
        return kv.transpose(0, 1).chunk(2, dim=3)

    def forward(self, g: Tensor, k: Tensor, v: Tensor, mask: Tensor, request_of: Tensor, groups: list[Group]) -> Tensor:
        tokens, pairs, width = g.shape
        q = self.q(unit_rms(g)).view(tokens, pairs, self.readable, width).permute(1, 2, 0, 3)  # (P, F, M, d)
        read = request_attention(q, k, v, request_of, mask=mask, groups=groups)
        return self.out(read.permute(2, 0, 1, 3).flatten(2).to(g.dtype))  # (M, P, d)


class RequestState(NamedTuple):
    """What a request costs once: keys, values [R, F, N_l, d] and mask of every layer, its global token shares [R, d]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]
    user: Tensor
    context: Tensor


class CCFormer(nn.Module):
    """model(batch) -> logits [P, 3]; batches of a `BehaviourTable`. titles float32[n_items + 1, 384]."""

    def __init__(self, config: CCFormerConfig, vocab: dict[str, int], item_genres: Tensor, titles: Tensor):
        super().__init__()
        self.config = c = config
        self.encoder = TitledEncoder(vocab, item_genres, titles, field=c.field, summed=False)
        self.tokenizer = FieldTokenizer(c, self.encoder)
        self.layers = nn.ModuleList(_stream_layer(c) for _ in range(c.layers))
        readable = 1 if c.read == "id" else c.stream_count
        self.readers = nn.ModuleList(
            FieldReader(c.stream_count, c.stream_width, c.width, readable) for _ in range(c.layers)
        )
        self.shuffle = HeadShuffle(GLOBALS, c.width)
        self.ffns = nn.ModuleList(PerTokenFFN(GLOBALS, c.width, c.expansion, c.dropout) for _ in range(c.layers))
        self.tower = nn.Sequential(
            nn.Linear(GLOBALS * c.width, c.tower), nn.SiLU(), Dropout(c.dropout), nn.Linear(c.tower, TASKS)
        )

    def encode(self, batch: BehaviourBatch) -> list[tuple[Tensor, Tensor]]:
        """Streams and mask after every layer: S [F, R, N_l, d], bool[R, N_l]."""
        s, mask = self.tokenizer.events(batch, self.encoder), batch.hist_mask
        if self.config.compression == "truncate":
            kept = self.config.lengths(mask.shape[1])[0]
            s, mask = s[:, :, -kept:], mask[:, -kept:]
        states = []
        for layer in self.layers:
            s, mask = layer(s, mask)
            states.append((s, mask))
        return states

    def prepare(self, batch: BehaviourBatch) -> RequestState:
        states = self.encode(batch)
        pairs = [reader.keys_values(s) for reader, (s, _) in zip(self.readers, states, strict=True)]
        keys, values = zip(*pairs, strict=True)
        user, context = self.tokenizer.request(batch, self.encoder)
        return RequestState(keys, values, tuple(mask for _, mask in states), user, context)

    def score(self, state: RequestState, batch: BehaviourBatch) -> Tensor:
        request_of = batch.request_of
        groups = request_groups(request_of, len(state.user))
        g = self.tokenizer.targets(state.user, state.context, batch, self.encoder)  # (M, P, d)
        for reader, ffn, k, v, mask in zip(self.readers, self.ffns, state.keys, state.values, state.masks, strict=True):
            g = g + reader(g, k, v, mask, request_of, groups)
            g = g + ffn(self.shuffle(unit_rms(g)))
        return self.tower(unit_rms(g).transpose(0, 1).flatten(1))

    def forward(self, batch: BehaviourBatch) -> Tensor:
        if self.config.targets == "alone":
            batch = one_per_request(batch)
        return self.score(self.prepare(batch), batch)

    def training_loss(self, batch: BehaviourBatch, task_loss) -> Tensor:
        logits = self(batch)
        if self.config.tasks == "all":
            return task_loss(logits)
        with float32_region(logits.device):
            like = F.binary_cross_entropy_with_logits(logits[:, LIKE].float(), batch.like, reduction="none")
            return (like * batch.rated).sum() / batch.rated.sum().clamp(min=1)

    def dense_params(self) -> int:
        """Parameters besides embedding tables and field projections."""
        return sum(p.numel() for p in self.parameters()) - sum(p.numel() for p in self.encoder.parameters())

    def stream_flops(self, requests: int, history: int) -> int:
        """Forward matrix FLOPs of the sequence branch behind the tokenizer, keys and values included."""
        lengths, total = self.config.lengths(history), 0
        for layer, reader, before, after in zip(self.layers, self.readers, lengths, lengths[1:], strict=False):
            total += layer.flops(requests, before) + 2 * requests * after * reader.kv.weight.numel()
        return total


def one_per_request(batch: BehaviourBatch) -> BehaviourBatch:
    """The same pairs as requests of one target each: request-level columns [R, ...] -> [P, ...]."""
    copied = {f.name: getattr(batch, f.name)[batch.request_of] for f in fields(batch) if f.name not in PAIR_COLUMNS}
    own = torch.arange(len(batch.request_of), device=batch.request_of.device)
    return replace(batch, **copied, request_of=own)
