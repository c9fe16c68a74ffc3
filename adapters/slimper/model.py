"""SlimPer (arXiv:2607.12281): a fixed-size knowledge base per candidate that goes back to raw user tokens in every layer.

    E = RMSNorm([tokens_seq; tokens_field])                                     [R, N, d], once per request, never updated
    X^0 = reshape(W_0 f_item + b_0) + slot                                      [P, K, d]
    Q = W_q X, T = W_t X,  L_K(X) = W_r X                                       maps along the slots only
    R_c = softmax(Q E_{r(c)}^T / sqrt(d)) E_{r(c)}                              Select
    lambda = R T^T                                                              Match, [P, q, t]
    X^{k+1} = RMSNorm(X^k + reshape(MLP([RMSNorm(vec lambda); vec L_K(X^k); D_u])))      Refine
    logits = MLP(vec X^last)                                                    engage, like, love

R requests, P candidates (flat pairs) with `request_of` int64[P]; E is read by request and never copied per candidate.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.dropout import Dropout
from auto_research.blocks.request_attention import request_attention
from auto_research.blocks.request_encoder import USER_FIELDS, RequestEncoder
from auto_research.blocks.request_groups import Group, request_groups
from auto_research.blocks.sequence_summary import masked_mean
from auto_research.data.requests import RequestBatch

TASKS = 3  # engage, like, love
FIELD_TOKENS = 8  # user_id, age, gender, occupation, zip, hour, weekday with gap, user statistics


@dataclass(frozen=True)
class SlimPerConfig:
    """Sizes: width d, slots K, layers, queries q, templates t, hidden (Refine), user_width (D_u), head (tower).

    Ablations. evidence: each (Select in every layer) | once (layer 0's R is reused); match: False feeds vec(R) to Refine
    in place of lambda; tokens: raw | refined (E goes through a self-attention layer per level); maps: slots | channels
    (W_q, W_t, W_r become Linear(d, d) of each slot); start: item | user (D_u is part of the initialisation);
    residual: False drops X^k in Refine; readout: last | sum (logits of all layers added);
    storage: request | candidate (E copied per candidate: the memory baseline, same logits).
    """

    width: int = 64
    slots: int = 16
    layers: int = 3
    queries: int = 8
    templates: int = 8
    hidden: int = 256
    user_width: int = 64
    head: int = 128
    field: int = 16
    dropout: float = 0.2
    evidence: str = "each"
    match: bool = True
    tokens: str = "raw"
    maps: str = "slots"
    start: str = "item"
    residual: bool = True
    readout: str = "last"
    storage: str = "request"

    def __post_init__(self) -> None:
        known = {
            "evidence": ("each", "once"),
            "tokens": ("raw", "refined"),
            "maps": ("slots", "channels"),
            "start": ("item", "user"),
            "readout": ("last", "sum"),
            "storage": ("request", "candidate"),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"slimper: {name} {getattr(self, name)!r} is not one of {', '.join(values)}")
        if self.maps == "channels" and max(self.queries, self.templates) > self.slots:
            raise ValueError("slimper: channel maps read one slot per query or template")


class UserTokens(NamedTuple):
    """Request-level part: E [R, N, d] (one tensor for all layers), mask bool[R, N], user D_u [R, user_width]."""

    tokens: Tensor
    mask: Tensor
    user: Tensor


class Tokenizer(nn.Module):
    """RequestBatch -> raw user tokens E and D_u; candidate fields f_item [P, 5 w] (item, genres, decade, popularity, cross).

    N = L history events + 8 field tokens, each field with its own Linear. E is RMS-normalised once, here.
    D_u = MLP([user statistics; masked mean of E]).
    """

    def __init__(
        self,
        vocab: dict[str, int],
        item_genres: Tensor,
        width: int,
        *,
        user_width: int = 64,
        field: int = 16,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.encoder = RequestEncoder(vocab, item_genres, field=field)
        self.event = nn.Linear(self.encoder.event_width, width)
        widths = [field] * (len(USER_FIELDS) + 1) + [2 * field, field]  # weekday and gap are one token
        self.fields = nn.ModuleList(nn.Linear(w, width) for w in widths)
        self.norm = nn.RMSNorm(width)
        self.user = nn.Sequential(
            nn.Linear(field + width, user_width), nn.SiLU(), Dropout(dropout), nn.Linear(user_width, user_width)
        )
        self.dropout = Dropout(dropout)

    def forward(self, batch: RequestBatch) -> UserTokens:
        r = self.encoder.request(batch)
        field = self.encoder.field
        statistics = self.dropout(r.statistics)
        pieces = [
            self.dropout(piece) for piece in (*r.user.split(field, dim=1), *r.context.split([field, 2 * field], dim=1))
        ]
        fields = [layer(piece) for layer, piece in zip(self.fields, [*pieces, statistics], strict=True)]
        events = self.event(self.dropout(r.events))  # (R, L, d)
        tokens = self.norm(torch.cat([events, torch.stack(fields, dim=1)], dim=1))  # (R, N, d)
        mask = F.pad(r.mask, (0, len(fields)), value=True)
        user = self.user(torch.cat([statistics, masked_mean(tokens, mask)], dim=1))
        return UserTokens(tokens, mask, user)

    def item(self, batch: RequestBatch) -> Tensor:
        p = self.encoder.pairs(batch)
        return self.dropout(torch.cat([p.candidate, p.cross], dim=1))


class SlotMap(nn.Module):
    """L_m(X) = W X with W [m, K]: mixes the K slots into m rows, alike for all channels; [P, K, d] -> [P, m, d]."""

    def __init__(self, rows: int, slots: int, identity: bool = False):
        super().__init__()
        start = torch.eye(rows, slots) if identity else torch.randn(rows, slots) * slots**-0.5
        self.weight = nn.Parameter(start)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ x


class ChannelMap(nn.Module):
    """Ablation of SlotMap: row i is one Linear(d, d) of slot i; no slot reads another."""

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.rows, self.project = rows, nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x[:, : self.rows])


def select(q: Tensor, tokens: Tensor, mask: Tensor, request_of: Tensor, groups: list[Group] | None = None) -> Tensor:
    """R_c = softmax(Q_c E_{r(c)}^T / sqrt(d)) E_{r(c)}: q [P, q, d], tokens [R, N, d], mask bool[R, N] -> [P, q, d]."""
    keys = tokens.unsqueeze(1)  # (R, 1, N, d): one head, key and value alike
    return request_attention(q.unsqueeze(1), keys, keys, request_of, mask=mask, groups=groups).squeeze(1)


def match(evidence: Tensor, templates: Tensor) -> Tensor:
    """lambda = R T^T: [P, q, d], [P, t, d] -> [P, q, t]."""
    return evidence @ templates.transpose(1, 2)


class TokenRefiner(nn.Module):
    """Ablation: the O(N^2) design that raw tokens replace, E + SelfAttention(E), normalised; [R, N, d] -> [R, N, d]."""

    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.RMSNorm(width)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(tokens).unsqueeze(1).chunk(3, dim=3)  # (R, 1, N, d) each
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.norm(tokens + self.out(read.squeeze(1)))


class Layer(nn.Module):
    """Select, Match and Refine of one level: knowledge X [P, K, d] -> [P, K, d]."""

    def __init__(self, config: SlimPerConfig):
        super().__init__()
        q, t, k, d = config.queries, config.templates, config.slots, config.width
        slot = config.maps == "slots"
        self.query_map = SlotMap(q, k) if slot else ChannelMap(q, d)
        self.template_map = (SlotMap(t, k) if slot else ChannelMap(t, d)) if config.match else None
        self.refine_map = SlotMap(k, k, identity=True) if slot else ChannelMap(k, d)
        facts = q * t if config.match else q * d
        self.residual = config.residual
        self.fact_norm, self.norm = nn.RMSNorm(facts), nn.RMSNorm(d)
        self.pair_in = nn.Linear(facts + k * d, config.hidden)
        self.user_in = nn.Linear(config.user_width, config.hidden, bias=False)  # the columns of D_u, once per request
        self.out = nn.Linear(config.hidden, k * d)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        state: UserTokens,
        request_of: Tensor,
        groups: list[Group] | None = None,
        evidence: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """-> X^{k+1} and the evidence R that was used (`evidence` when it is given)."""
        if evidence is None:
            evidence = select(self.query_map(x), state.tokens, state.mask, request_of, groups)  # (P, q, d)
        facts = evidence if self.template_map is None else match(evidence, self.template_map(x))
        pair = torch.cat([self.fact_norm(facts.flatten(1)), self.refine_map(x).flatten(1)], dim=1)
        h = F.silu(self.pair_in(pair) + self.user_in(state.user)[request_of])  # (P, hidden)
        change = self.out(self.dropout(h)).view_as(x)
        return self.norm(x + change if self.residual else change), evidence


class SlimPer(nn.Module):
    """model(batch) -> logits [P, 3]. `prepare` once per request (E, D_u), `score` per chunk of candidates."""

    def __init__(self, config: SlimPerConfig, vocab: dict[str, int], item_genres: Tensor):
        super().__init__()
        self.config = config
        k, d = config.slots, config.width
        self.tokenizer = Tokenizer(
            vocab, item_genres, d, user_width=config.user_width, field=config.field, dropout=config.dropout
        )
        inputs = self.tokenizer.encoder.pair_width + (config.user_width if config.start == "user" else 0)
        self.start = nn.Linear(inputs, k * d)
        self.slot = nn.Parameter(torch.randn(k, d) * d**-0.5)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        refined = config.layers if config.tokens == "refined" else 0
        self.refiners = nn.ModuleList(TokenRefiner(d) for _ in range(refined))
        if config.evidence == "once":
            for layer in self.layers[1:]:
                layer.query_map = None
        self.head = nn.Sequential(
            nn.Linear(k * d, config.head), nn.SiLU(), Dropout(config.dropout), nn.Linear(config.head, TASKS)
        )

    def prepare(self, batch: RequestBatch) -> UserTokens:
        return self.tokenizer(batch)

    def score(self, state: UserTokens, batch: RequestBatch) -> Tensor:
        states = self.knowledge(state, self.tokenizer.item(batch), batch.request_of)
        if self.config.readout == "sum":
            return sum(self.head(x.flatten(1)) for x in states[1:])
        return self.head(states[-1].flatten(1))

    def knowledge(self, state: UserTokens, item: Tensor, request_of: Tensor) -> list[Tensor]:
        """X^0 .. X^layers, each [P, K, d]; item [P, 5 w]."""
        if self.config.start == "user":
            item = torch.cat([item, state.user[request_of]], dim=1)
        x = self.start(item).unflatten(1, (self.config.slots, self.config.width)) + self.slot
        if self.config.storage == "candidate":
            state, request_of = copied(state, request_of)
        groups = request_groups(request_of, len(state.tokens))
        states, evidence = [x], None
        for level, layer in enumerate(self.layers):
            if self.refiners:
                state = state._replace(tokens=self.refiners[level](state.tokens, state.mask))
            x, found = layer(x, state, request_of, groups, evidence)
            evidence = found if self.config.evidence == "once" else None
            states.append(x)
        return states

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def score_elements(self, tokens: int) -> int:
        """Attention scores per pair: layers * q * N."""
        selects = 1 if self.config.evidence == "once" else self.config.layers
        return selects * self.config.queries * tokens

    def flops(self, pairs: int, requests: int, history: int) -> int:
        """Forward matrix FLOPs of the raw-token model; E and D_u are paid once per request."""
        c, w = self.config, self.config.field
        n, q, t, k, d = history + FIELD_TOKENS, c.queries, c.templates, c.slots, c.width
        request = 2 * d * (history * 3 * w + (FIELD_TOKENS + 1) * w) + 2 * n * d
        request += 2 * c.user_width * (w + d + c.user_width) + c.layers * 2 * c.user_width * c.hidden
        pair = 2 * 5 * w * k * d + 2 * c.head * (k * d + TASKS)
        maps, attention = 2 * (q + t + k) * k * d, 4 * q * n * d
        pair += c.layers * (maps + attention + 2 * q * t * d + 2 * c.hidden * (q * t + 2 * k * d))
        return requests * request + pairs * pair


def copied(state: UserTokens, request_of: Tensor) -> tuple[UserTokens, Tensor]:
    """User tensors materialised per candidate: [R, ...] -> [P, ...], and each candidate its own request."""
    own = torch.arange(len(request_of), device=request_of.device)
    return UserTokens(*(part[request_of] for part in state)), own


def dense_params(model: nn.Module) -> int:
    """Parameters without embedding tables and field projections, which all arms share."""
    shared = {id(p) for p in model.tokenizer.encoder.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in shared)
