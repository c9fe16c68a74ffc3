"""Deep Interest Network (arXiv:1706.06978): the user vector is recomputed for every candidate.

    a_j = MLP([e_j; v; e_j - v; e_j * v])                     local activation unit
    v_U(v) = (1 / sqrt(L_max)) sum_j a_j e_j                  no softmax
    logits = MLP_{200,80}([v_U; v; v_U * v; fields])          engage, like, love
    w_j <- w_j - eta [dL/dw_j + lambda (alpha_mj / n_j) w_j]  mini-batch-aware regularisation

Everything is written on P flat pairs; a request's history is embedded once and shared by its candidates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from auto_research.blocks.activation_unit import AttentionPooling
from auto_research.blocks.dice import ACTIVATIONS
from auto_research.blocks.dropout import Dropout
from auto_research.blocks.request_encoder import USER_FIELDS, RequestEncoder, RequestFeatures
from auto_research.data.requests import RequestBatch

TASKS = 3  # engage, like, love
REGULARISED = ("item", "user_id", "zip")
WIDE_SCALE = 10.0  # AdamW moves a parameter by the learning rate, too little for coefficients that start at zero


@dataclass(frozen=True)
class DINConfig:
    """history L_max (a constant of the model); field: width of one field, events are 3 * field wide (d = 48).

    pooling: attention | softmax | mean | sum; activation: dice | prelu (network), unit_activation: dice | prelu |
    sigmoid (None = activation); inputs: full | ids (d = 2 * field: ids and genres only, as in the paper);
    product: feed v_U * v to the network; wide: add the linear part of Wide & Deep; user_fields: empty for split=user;
    mba: lambda of mini-batch-aware regularisation, plain_l2: lambda of L2 on all rows each step (ablation).
    """

    history: int = 50
    field: int = 16
    pooling: str = "attention"
    activation: str = "prelu"
    unit_activation: str | None = None
    unit_hidden: tuple[int, int] = (80, 40)
    hidden: tuple[int, int] = (200, 80)
    inputs: str = "full"
    product: bool = True
    wide: bool = False
    user_fields: tuple[str, ...] = USER_FIELDS
    dropout: float = 0.2
    mba: float = 0.0
    plain_l2: float = 0.0


class DIN(nn.Module):
    """model(batch) -> logits [P, 3]. The arms of the card are configurations of this class.

    `occurrences`: n_j per regularised table, int64[rows]; needed when mba > 0.
    """

    def __init__(
        self,
        config: DINConfig,
        vocab: dict[str, int],
        item_genres: Tensor,
        occurrences: dict[str, Tensor] | None = None,
    ):
        super().__init__()
        self.config = config
        self.encoder = RequestEncoder(vocab, item_genres, field=config.field, user_fields=config.user_fields)
        self.width = config.field * (3 if config.inputs == "full" else 2)  # d
        self.attention = AttentionPooling(
            self.width,
            longest=config.history,
            pooling=config.pooling,
            hidden=config.unit_hidden,
            activation=config.unit_activation or config.activation,
        )
        fields = self.encoder.request_width + self.encoder.pair_width - 2 * config.field  # item and genres are in v
        inputs = (3 if config.product else 2) * self.width + fields  # 3 * 48 + 160 + 32 = 336
        activation = ACTIVATIONS[config.activation]
        self.inputs = inputs
        self.dropout = Dropout(config.dropout)
        self.first, self.first_activation = nn.Linear(inputs, config.hidden[0]), activation(config.hidden[0])
        self.second, self.second_activation = nn.Linear(*config.hidden), activation(config.hidden[1])
        self.last = nn.Linear(config.hidden[1], TASKS)
        self.wide = WideFeatures(vocab, item_genres, config.user_fields) if config.wide else None
        self.regulariser = MiniBatchAware(self.tables(), occurrences, config.mba) if config.mba else None

    def tables(self) -> dict[str, nn.Parameter]:
        """The tables that regularisation concerns: item, user_id, zip."""
        found = {"item": self.encoder.item.weight}
        return found | {name: self.encoder.tables[name].weight for name in REGULARISED if name in self.encoder.tables}

    def prepare(self, batch: RequestBatch) -> RequestFeatures:
        """A request's part: fields and the embedded history, once for all its candidates."""
        r = self.encoder.request(batch)
        return r._replace(events=r.events[:, :, : self.width])

    def score(self, r: RequestFeatures, batch: RequestBatch) -> Tensor:
        p = self.encoder.pairs(batch)
        v = p.key[:, : self.width]  # (P, d)
        v_u = self.attention(r.events, r.mask, v, batch.request_of)  # (P, d)
        parts = [v_u, v, v_u * v] if self.config.product else [v_u, v]
        rest = p.candidate[:, 2 * self.config.field :]  # decade, popularity
        x = self.dropout(torch.cat([*parts, r.flat()[batch.request_of], rest, p.cross], dim=1))
        x = self.dropout(self.first_activation(self.first(x)))
        x = self.dropout(self.second_activation(self.second(x)))
        logits = self.last(x)
        return logits + self.wide(batch) if self.wide is not None else logits

    def forward(self, batch: RequestBatch) -> Tensor:
        if self.training and self.regulariser is not None:
            self.regulariser.observe(batch)
        return self.score(self.prepare(batch), batch)

    def attention_weights(self, batch: RequestBatch) -> Tensor:
        """a_j of every pair and event, [P, L]; 0 at padding."""
        r = self.prepare(batch)
        key = self.encoder.pairs(batch).key[:, : self.width]
        return self.attention.weights(r.events, r.mask, key, batch.request_of)

    def extra_loss(self) -> Tensor:
        """Plain L2 on all rows each step (ablation of mini-batch-aware regularisation), else 0."""
        if not self.config.plain_l2:
            return self.last.bias.new_zeros(())
        return 0.5 * self.config.plain_l2 * sum(w[1:].square().sum() for w in self.tables().values())

    def param_groups(self, weight_decay: float) -> list[dict]:
        return groups_without_tables(self, weight_decay)


def groups_without_tables(model: nn.Module, weight_decay: float) -> list[dict]:
    """Optimizer groups: matrices decay; embedding tables (which regularisation owns), biases and slopes do not."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    kept = [p for p in model.parameters() if id(p) in tables or p.ndim < 2]
    free = {id(p) for p in kept}
    return [
        {"params": [p for p in model.parameters() if id(p) not in free], "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]


class MiniBatchAware:
    """Adds lambda * (alpha_mj / n_j) * w_j to the gradient of the tables, alpha_mj = 1 if id j occurs in batch m.

    n_j = max(1, occurrences of id j in the train table); padding id 0 gets nothing. Works as a gradient hook, so under
    Adam the added gradient passes through the moments, and clipping sees it.
    """

    def __init__(self, tables: dict[str, nn.Parameter], occurrences: dict[str, Tensor] | None, strength: float):
        if occurrences is None:
            raise ValueError("mini-batch-aware regularisation needs the occurrences n_j of the train table")
        self.factor = {name: strength / occurrences[name].clamp(min=1).float() for name in tables}
        self.present: dict[str, Tensor] = {}
        for name, table in tables.items():
            table.register_hook(lambda gradient, name=name, table=table: self.added(name, table, gradient))

    def observe(self, batch: RequestBatch) -> None:
        """Remember which ids the batch holds; bincount > 0, because unique ids are not deterministic on CUDA.

        Empty history slots hold the padding id, which is never present.
        """
        ids = {
            "item": torch.cat([batch.item, batch.hist_item.flatten()]),
            "user_id": batch.user_id,
            "zip": batch.zip,
        }
        for name in self.factor:
            self.present[name] = torch.bincount(ids[name], minlength=len(self.factor[name])) > 0
            self.present[name][0] = False

    def added(self, name: str, table: Tensor, gradient: Tensor) -> Tensor:
        """gradient + lambda alpha / n * w; rows that are absent keep their gradient bit for bit."""
        if name not in self.present:
            return gradient
        scale = (self.factor[name].to(gradient.device) * self.present[name]).unsqueeze(1)
        return torch.where(scale > 0, gradient + scale * table.detach(), gradient)


class WideFeatures(nn.Module):
    """Linear part: user and item bias, user statistics, popularity, cross features, and genre crosses -> [P, 3].

    Genre crosses: candidate genres x the user's like-rate of each genre, and an age x genre table. A coefficient is
    WIDE_SCALE times its parameter; tables start at zero and the dense coefficients as those of nn.Linear.
    """

    def __init__(self, vocab: dict[str, int], item_genres: Tensor, user_fields: tuple[str, ...] = USER_FIELDS):
        super().__init__()
        item_genres = torch.as_tensor(item_genres, dtype=torch.float32)
        genres = item_genres.shape[1]
        self.register_buffer("item_genres", item_genres, persistent=False)
        self.item = nn.Embedding(vocab["item"], TASKS)
        self.user = nn.Embedding(vocab["user_id"], TASKS) if "user_id" in user_fields else None
        self.age = nn.Embedding(vocab["age"], genres * TASKS) if "age" in user_fields else None
        self.dense = nn.Linear(3 + genres + 2 + 2 + genres + genres, TASKS)
        for table in (self.item, self.user, self.age):
            if table is not None:
                nn.init.zeros_(table.weight)
        with torch.no_grad():
            for parameter in self.dense.parameters():
                parameter.div_(WIDE_SCALE)

    def forward(self, batch: RequestBatch) -> Tensor:
        request = batch.request_of
        genres = self.item_genres[batch.item]  # (P, G)
        statistics = batch.user_stats[request]  # (P, 3 + G)
        liked = statistics[:, 3:] * genres
        x = self.dense(torch.cat([statistics, batch.popularity, batch.cross, genres, liked], dim=1))
        x = x + self.item(batch.item)
        if self.user is not None:
            x = x + self.user(batch.user_id)[request]
        if self.age is not None:
            x = x + torch.einsum("pg,pgt->pt", genres, self.age(batch.age)[request].unflatten(1, (-1, TASKS)))
        return WIDE_SCALE * x


class LogisticRegression(nn.Module):
    """The arm logistic_regression: `WideFeatures` alone."""

    def __init__(self, vocab: dict[str, int], item_genres: Tensor, user_fields: tuple[str, ...] = USER_FIELDS):
        super().__init__()
        self.wide = WideFeatures(vocab, item_genres, user_fields)

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.wide(batch)

    def param_groups(self, weight_decay: float) -> list[dict]:
        return groups_without_tables(self, weight_decay)
