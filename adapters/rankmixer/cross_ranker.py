"""DCNv2 on RankMixer's input vector, sized to its parameter count: the arm dcnv2_matched."""

from torch import Tensor, nn

from adapters.rankmixer.model import TASKS, RankerInput, RankMixerConfig, RequestState, decay_by_name
from auto_research.blocks.cross_network import CrossNetwork
from auto_research.blocks.dropout import Dropout
from auto_research.data.requests import RequestBatch


class CrossRanker(nn.Module):
    """Baseline: DCNv2 (stacked: cross layers, then an MLP) on the input vector of RankMixer; sizes by `matched_sizes`."""

    def __init__(
        self,
        config: RankMixerConfig,
        vocab: dict[str, int],
        item_genres: Tensor,
        *,
        layers: int,
        rank: int | None,
        hidden: int,
    ):
        super().__init__()
        self.input = RankerInput(config, vocab, item_genres)
        self.cross = CrossNetwork(self.input.width, layers, rank)
        self.mlp = nn.Sequential(
            *(nn.Linear(self.input.width, hidden), nn.GELU(), Dropout(config.dropout)),
            *(nn.Linear(hidden, hidden), nn.GELU(), Dropout(config.dropout)),
            nn.Linear(hidden, TASKS),
        )

    def prepare(self, batch: RequestBatch) -> RequestState:
        return self.input.prepare(batch)

    def score(self, state: RequestState, batch: RequestBatch) -> Tensor:
        return self.after_input(self.input.score(state, batch))

    def after_input(self, e: Tensor) -> Tensor:
        """Input vectors [P, E] -> logits [P, 3]."""
        return self.mlp(self.cross(e))

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.score(self.prepare(batch), batch)

    def param_groups(self, weight_decay: float) -> list[dict]:
        return decay_by_name(self, weight_decay)

    def dense_params(self) -> int:
        return sum(p.numel() for part in (self.cross, self.mlp) for p in part.parameters())


CROSS_SHARE = 0.72  # of the parameters at the card's default sizes: 407,376 of 566,659


def matched_sizes(target: int, inputs: int, layers: int) -> tuple[int | None, int]:
    """(rank of the cross layers, MLP width w) so that cross layers and the MLP inputs -> w -> w -> 3 have about `target`
    parameters. The cross layers are full (rank None) where they fit, else of the rank that keeps their share."""
    rank, cross = None, layers * (inputs**2 + inputs)
    if cross > 0.8 * target:
        rank = max(1, round((CROSS_SHARE * target / layers - inputs) / (2 * inputs)))
        cross = layers * (2 * rank * inputs + inputs)
    left = target - cross - TASKS
    root = inputs + 2 + TASKS  # w^2 + root w = left
    return rank, max(8, round((-root + (root**2 + 4 * max(left, 0)) ** 0.5) / 2))
