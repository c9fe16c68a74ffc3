"""Frozen title vectors as one more content feature of every arm, beside the genres."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.request_encoder import RequestEncoder


class TitledEncoder(RequestEncoder):
    """`RequestEncoder` whose items carry a title vector (float32[n_items + 1, D], a buffer that is not saved).

    summed: the vector's projection is added to the genres' one, so that widths stay as they are (baselines); without it
    `content_vectors` gives [genres; title] for layers that project them themselves.
    """

    def __init__(
        self, vocab: dict[str, int], item_genres: Tensor, titles: Tensor, *, field: int = 16, summed: bool = True
    ):
        super().__init__(vocab, item_genres, field=field)
        titles = torch.as_tensor(titles, dtype=torch.float32)
        self.register_buffer("titles", titles, persistent=False)
        self.title = nn.Linear(titles.shape[1], field, bias=False) if summed else None

    def content_vectors(self) -> Tensor:
        """[genres w; title D] of the whole vocabulary, [n_items + 1, w + D]."""
        genres = self.genres(self.item_genres)
        return torch.cat([genres, self.titles.to(genres.dtype)], dim=1)

    def item_vectors(self) -> Tensor:
        return self.rows(torch.arange(len(self.titles), device=self.titles.device))

    def rows(self, ids: Tensor) -> Tensor:
        """[item; genres + title] of items, [..., 2 w]."""
        content = self.genres(self.item_genres[ids])
        if self.title is not None:
            content = content + self.title(self.titles[ids].to(content.dtype))
        return torch.cat([self.item(ids), content], dim=-1)

    def projected(self, layer: nn.Linear, ids: Tensor) -> Tensor:
        """layer([genres; title]) of items, [...] -> [..., width]."""
        if not self.few(ids):
            return F.embedding(ids, layer(self.content_vectors()))
        genres = self.genres(self.item_genres[ids])
        return layer(torch.cat([genres, self.titles[ids].to(genres.dtype)], dim=-1))
