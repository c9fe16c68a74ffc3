"""Field embeddings of the request table: user | context | user statistics | candidate | cross, and behaviour events.

Widths at the default field width w = 16: user 5w = 80, context 3w = 48, user statistics w = 16, candidate 4w = 64
(item, genres, decade, popularity), cross w = 16; an event is [item w; genres w; rating w/2; age w/2] = 48 and the
candidate as an attention key is [item w; genres w; learned constant w] = 48. Candidate and events share the item
table and the genre projection.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.data.requests import RequestBatch

USER_FIELDS = ("user_id", "age", "gender", "occupation", "zip")
CONTEXT_FIELDS = ("hour", "weekday", "gap")
START_SCALE = 0.05  # standard deviation of every embedding table at the start


class RequestFeatures(NamedTuple):
    """What is computed once per request: user [R, 5w], context [R, 3w], statistics [R, w], events [R, L, 3w], mask."""

    user: Tensor
    context: Tensor
    statistics: Tensor
    events: Tensor
    mask: Tensor

    def flat(self) -> Tensor:
        """[R, 9w]: user | context | statistics."""
        return torch.cat([self.user, self.context, self.statistics], dim=1)


class PairFeatures(NamedTuple):
    """What is computed per pair: candidate [P, 4w], key [P, 3w] (same space as events), cross [P, w]."""

    candidate: Tensor
    key: Tensor
    cross: Tensor


def embedding(rows: int, width: int, padding: bool = False) -> nn.Embedding:
    """Table [rows, width]; row 0 is zero and stays so when it is padding."""
    table = nn.Embedding(rows, width, padding_idx=0 if padding else None)
    nn.init.normal_(table.weight, std=START_SCALE)
    if padding:
        with torch.no_grad():
            table.weight[0].zero_()
    return table


class ItemTables(nn.Module):
    """Item vectors [item w; genres w] of a module with `item` (a table), `genres` (a Linear) and `item_genres`."""

    def item_vectors(self) -> Tensor:
        """Of the whole vocabulary, [n_items + 1, 2w]."""
        return torch.cat([self.item.weight, self.genres(self.item_genres)], dim=1)

    def rows(self, ids: Tensor) -> Tensor:
        """Of these items alone, [..] -> [.., 2w]."""
        return torch.cat([self.item(ids), self.genres(self.item_genres[ids])], dim=-1)

    def few(self, ids: Tensor) -> bool:
        """Whether projecting these items is cheaper than projecting the vocabulary and looking them up."""
        return ids.numel() < len(self.item_genres)

    def look_up(self, ids: Tensor, vectors: Tensor | None = None) -> Tensor:
        """[..] -> [.., 2w], from `vectors` (`item_vectors()`) where given, else the cheaper way."""
        if vectors is None and self.few(ids):
            return self.rows(ids)
        return F.embedding(ids, self.item_vectors() if vectors is None else vectors)


class RequestEncoder(ItemTables):
    """Embeds a `RequestBatch`.

    Parameters
    ----------
    vocab: embedding sizes including padding, as `RequestTable.vocab`.
    item_genres: float32[n_items + 1, G] multi-hot genres, row 0 zero.
    field: width w of one field, even.
    user_fields: user fields to use; empty drops the user block (split by user).
    """

    def __init__(
        self, vocab: dict[str, int], item_genres: Tensor, *, field: int = 16, user_fields: tuple[str, ...] = USER_FIELDS
    ):
        super().__init__()
        if field % 2:
            raise ValueError(f"field width {field} is odd")
        self.field, self.user_fields = field, tuple(user_fields)
        item_genres = torch.as_tensor(item_genres, dtype=torch.float32)
        genres = item_genres.shape[1]
        self.register_buffer("item_genres", item_genres, persistent=False)
        self.tables = nn.ModuleDict({name: embedding(vocab[name], field) for name in self.user_fields + CONTEXT_FIELDS})
        self.item = embedding(vocab["item"], field, padding=True)
        self.decade = embedding(vocab["decade"], field)
        self.rating = embedding(vocab["hist_rating"], field // 2, padding=True)
        self.event_age = embedding(vocab["hist_age"], field // 2)
        self.genres = nn.Linear(genres, field)
        self.user_statistics = nn.Linear(3 + genres, field)
        self.popularity = nn.Linear(2, field)
        self.cross = nn.Linear(2, field)
        self.key_constant = nn.Parameter(torch.randn(field) * START_SCALE)

    @property
    def user_width(self) -> int:
        return len(self.user_fields) * self.field

    @property
    def request_width(self) -> int:
        """Width of `RequestFeatures.flat`."""
        return self.user_width + (len(CONTEXT_FIELDS) + 1) * self.field

    @property
    def pair_width(self) -> int:
        """Candidate and cross together."""
        return 5 * self.field

    @property
    def event_width(self) -> int:
        return 3 * self.field

    def request(self, batch: RequestBatch, vectors: Tensor | None = None) -> RequestFeatures:
        of = [self.tables[name](getattr(batch, name)) for name in self.user_fields]
        user = torch.cat(of, dim=1) if of else self.item.weight.new_zeros((len(batch.hour), 0))
        context = torch.cat([self.tables[name](getattr(batch, name)) for name in CONTEXT_FIELDS], dim=1)
        events = torch.cat(
            [self.look_up(batch.hist_item, vectors), self.rating(batch.hist_rating), self.event_age(batch.hist_age)],
            dim=2,
        )  # (R, L, 3w)
        return RequestFeatures(user, context, self.user_statistics(batch.user_stats), events, batch.hist_mask)

    def pairs(self, batch: RequestBatch, vectors: Tensor | None = None) -> PairFeatures:
        item = self.look_up(batch.item, vectors)  # (P, 2w)
        candidate = torch.cat([item, self.decade(batch.decade), self.popularity(batch.popularity)], dim=1)
        key = torch.cat([item, self.key_constant.expand(len(item), -1)], dim=1)
        return PairFeatures(candidate, key, self.cross(batch.cross))

    def forward(self, batch: RequestBatch) -> tuple[RequestFeatures, PairFeatures]:
        many = not (self.few(batch.hist_item) or self.few(batch.item))
        vectors = self.item_vectors() if many else None  # one projection serves events and candidates
        return self.request(batch, vectors), self.pairs(batch, vectors)
