"""Residual-quantised autoencoder: item vectors to code tuples through code books that are trained and used as trained.

    z = E(x);  r_0 = z;  c_l = argmin_k || r_{l-1} - e_{l,k} ||^2;  r_l = r_{l-1} - sg[e_{l,c_l}];  zhat = sum_l e_{l,c_l}
    L = || x - D(z + sg[zhat - z]) ||^2 + sum_l ( || sg[r_{l-1}] - e_l ||^2 + beta || r_{l-1} - sg[e_l] ||^2 )

Norms are summed over dimensions; every loss is per row. Source: TIGER (arXiv:2305.05065). Options: several input
modalities fused before the quantiser, decoding from a random number of levels, and a contrastive pull on pairs of items
(PLUM, arXiv:2510.07784); a rotation and independent quantisers over the parts of the latent (BARGE, arXiv:2607.21028).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.blocks.residual_kmeans import kmeans
from auto_research.runtime.errors import ConfigError, CorruptFile
from auto_research.runtime.files import atomic_path, read_json, write_json
from auto_research.runtime.precision import float32_region
from auto_research.runtime.seeds import stable_rng, torch_generator

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU}
ROTATIONS = ("none", "householder", "random")


@dataclass(frozen=True)
class RQVAEConfig:
    """inputs: width of every modality.  hidden: hidden widths of every modality's encoder (decoders mirror them).

    sizes: codes of every level.  width: of the latent, over all channels, and of every encoder's output.  fuse: hidden
    widths of the MLP that joins several modalities.  channels: equal parts of the latent with a quantiser each.  rotation: of the latent before it
    is parted: "none", "householder" (learned product of `reflections` reflections) or "random" (the same, fixed).
    progressive: decode from the first r levels, r uniform in 1..L a row.  pair_weight, temperature: of the contrastive
    term.
    """

    inputs: tuple[int, ...]
    sizes: tuple[int, ...]
    hidden: tuple[tuple[int, ...], ...] = ((256, 128),)
    width: int = 32
    fuse: tuple[int, ...] = (64,)
    activation: str = "relu"
    beta: float = 0.25
    channels: int = 1
    rotation: str = "none"
    reflections: int = 8
    progressive: bool = False
    pair_weight: float = 0.0
    temperature: float = 0.1

    def __post_init__(self):
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError(f"an RQ-VAE needs at least one level of at least one code, got {list(self.sizes)}")
        if len(self.hidden) != len(self.inputs):
            raise ConfigError(f"{len(self.inputs)} input modalities need as many encoders, got {len(self.hidden)}")
        if self.channels < 1 or self.width % self.channels:
            raise ConfigError(f"a latent of width {self.width} has no {self.channels} equal channels")
        if self.rotation not in ROTATIONS:
            raise ConfigError(f"unknown rotation '{self.rotation}'; known: {', '.join(ROTATIONS)}")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"unknown activation '{self.activation}'; known: {', '.join(ACTIVATIONS)}")


class Quantised(NamedTuple):
    """codes: int64[B, L].  vectors: [B, L, d] chosen entries (with gradient to the books).

    loss: float32[B] code book and commitment terms.  residual: [B, L, d] what every level had to code, r_0..r_{L-1}.
    """

    codes: Tensor
    vectors: Tensor
    loss: Tensor
    residual: Tensor


class ResidualQuantizer(nn.Module):
    """L code books over vectors of width d; nearest entry level by level, ties to the lower code, in float32."""

    def __init__(self, sizes: Sequence[int], width: int, beta: float = 0.25):
        super().__init__()
        self.beta = beta
        self.books = nn.ParameterList([nn.Parameter(torch.zeros(size, width)) for size in sizes])

    def forward(self, z: Tensor) -> Quantised:
        """Quantise z [B, d]. Gradient of the loss: to the books, and to z by the commitment terms."""
        with float32_region(z.device):
            residual, loss = z.float(), torch.zeros(len(z), device=z.device)
            codes, vectors, residuals = [], [], []
            for book in self.books:
                code = nearest(residual, book)
                entry = book[code]
                fit = (residual.detach() - entry).square().sum(1)
                commitment = (residual - entry.detach()).square().sum(1)
                loss = loss + fit + self.beta * commitment
                codes.append(code)
                vectors.append(entry)
                residuals.append(residual)
                residual = residual - entry.detach()
            return Quantised(torch.stack(codes, 1), torch.stack(vectors, 1), loss, torch.stack(residuals, 1))

    @torch.no_grad()
    def initialise(self, z: Tensor, seed: int | tuple) -> None:
        """Set the books by k-means of the residuals of z, level by level."""
        residual = z.detach().cpu().float().numpy()
        for level, book in enumerate(self.books):
            found = kmeans(residual, len(book), seed=("rqvae", seed, level))
            book.copy_(torch.from_numpy(found.centroids))
            residual = residual - found.centroids[found.code]

    @torch.no_grad()
    def reset_unused(self, z: Tensor, rng: np.random.Generator) -> list[int]:
        """Move every entry that no row of z uses to a random current residual; entries moved on every level."""
        residual, moved = z.float(), []
        for book in self.books:
            code = nearest(residual, book)
            unused = torch.bincount(code, minlength=len(book)) == 0
            count = int(unused.sum())
            if count:
                rows = rng.choice(len(z), count, replace=count > len(z))
                book[unused] = residual[torch.from_numpy(rows).to(z.device)]
                code = nearest(residual, book)
            residual = residual - book[code]
            moved.append(count)
        return moved


class Rotation(nn.Module):
    """R = H_1 H_2 .. H_n with H_j = I - 2 v_j v_j^T / ||v_j||^2, built from rank-1 updates in float32.

    Orthogonal for any v; determinant +1 for an even n.
    """

    def __init__(self, width: int, reflections: int, learned: bool):
        super().__init__()
        self.v = nn.Parameter(torch.randn(reflections, width), requires_grad=learned)

    def forward(self, z: Tensor) -> Tensor:
        """Rows of z [B, d] times R^T, that is R z."""
        return self._reflect(z, range(len(self.v) - 1, -1, -1))

    def inverse(self, z: Tensor) -> Tensor:
        """R^T z."""
        return self._reflect(z, range(len(self.v)))

    def _reflect(self, z: Tensor, order: range) -> Tensor:
        with float32_region(z.device):
            z = z.float()
            for j in order:
                v = self.v[j].float()
                z = z - (z @ v).unsqueeze(1) * (2 / v.square().sum()) * v
            return z


class RQVAE(nn.Module):
    """Encoder, quantiser(s) and decoder. Inputs are a list of float tensors [B, inputs_m], one a modality.

    `quantising` is part of the state: False during unquantised warm-up steps, when zhat = z and only the reconstruction
    (and contrastive) terms exist.
    """

    def __init__(self, config: RQVAEConfig):
        super().__init__()
        self.config = config
        width, many = config.width, len(config.inputs) > 1
        shapes = [(n, *hidden, width) for n, hidden in zip(config.inputs, config.hidden, strict=True)]
        self.encoders = nn.ModuleList([_mlp(shape, config.activation) for shape in shapes])
        joined = (width * len(config.inputs), *config.fuse, width)
        self.fuse = _mlp(joined, config.activation) if many else nn.Identity()
        self.decoders = nn.ModuleList([_mlp(shape[::-1], config.activation) for shape in shapes])
        learned = config.rotation == "householder"
        self.rotation = Rotation(width, config.reflections, learned) if config.rotation != "none" else None
        part = width // config.channels
        self.quantizers = nn.ModuleList(
            [ResidualQuantizer(config.sizes, part, config.beta) for _ in range(config.channels)]
        )
        self.register_buffer("quantising", torch.tensor(False))

    def latent(self, inputs: Sequence[Tensor]) -> Tensor:
        """z' = R E(x), [B, width]."""
        parts = [encode(x) for encode, x in zip(self.encoders, inputs, strict=True)]
        z = self.fuse(torch.cat(parts, dim=1))
        return z if self.rotation is None else self.rotation(z)

    def channels(self, z: Tensor) -> tuple[Tensor, ...]:
        """The parts of a latent that have a quantiser each, [B, width / channels]."""
        return z.chunk(self.config.channels, dim=1)

    def decode(self, zhat: Tensor) -> list[Tensor]:
        """D(R^T zhat'), [B, inputs_m] of every modality."""
        zhat = zhat if self.rotation is None else self.rotation.inverse(zhat)
        return [decoder(zhat) for decoder in self.decoders]

    def losses(
        self, inputs: Sequence[Tensor], *, depth: Tensor | None = None, pairs: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Scalars, means over the batch: reconstruction, quantisation, pairs and loss, their weighted sum.

        depth: int64[B] number of levels each row is decoded from (None: all).
        pairs: int64[P, 2] row numbers of the item of every pair when the last 2 P rows of `inputs` are the items of P
        pairs (first members, then second ones): they serve the contrastive term only. The numbers tell equal items.
        """
        z = self.latent(inputs)
        rows = len(z) - (0 if pairs is None else 2 * len(pairs))
        if self.quantising:
            found = [quantizer(part) for quantizer, part in zip(self.quantizers, self.channels(z), strict=True)]
            full = torch.cat([q.vectors.sum(1) for q in found], dim=1)
            shown = full if depth is None else torch.cat([_first_levels(q.vectors[:rows], depth) for q in found], dim=1)
            quantisation = sum(q.loss[:rows].mean() for q in found)
        else:
            full = shown = z
            quantisation = torch.zeros((), device=z.device)
        zhat = z[:rows] + (shown[:rows] - z[:rows]).detach()
        error = [(x[:rows] - out).float().square().sum(1) for x, out in zip(inputs, self.decode(zhat), strict=True)]
        terms = {"reconstruction": sum(error).mean(), "quantisation": quantisation}
        loss = terms["reconstruction"] + quantisation
        if pairs is not None:
            members = z[rows:] + (full[rows:] - z[rows:]).detach()
            terms["pairs"] = pair_loss(members[: len(pairs)], members[len(pairs) :], pairs, self.config.temperature)
            loss = loss + self.config.pair_weight * terms["pairs"]
        return terms | {"loss": loss}

    @torch.no_grad()
    def start_quantising(self, inputs: Sequence[Tensor], seed: int) -> None:
        """k-means of the current latents of the whole catalogue into every quantiser's books; then quantise."""
        for channel, (quantizer, part) in enumerate(
            zip(self.quantizers, self.channels(self.latent(inputs)), strict=True)
        ):
            quantizer.initialise(part, (seed, channel))
        self.quantising.fill_(True)

    @torch.no_grad()
    def reset_unused(self, inputs: Sequence[Tensor], *parts) -> list[list[int]]:
        """`ResidualQuantizer.reset_unused` for every channel over the whole catalogue; `parts` name the random draw."""
        z = self.channels(self.latent(inputs))
        return [
            quantizer.reset_unused(part, stable_rng("rqvae-reset", channel, *parts))
            for channel, (quantizer, part) in enumerate(zip(self.quantizers, z, strict=True))
        ]

    @torch.no_grad()
    def codes(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """int64[B, L] of every channel: nearest entries of the trained books."""
        return [
            quantizer(part).codes
            for quantizer, part in zip(self.quantizers, self.channels(self.latent(inputs)), strict=True)
        ]

    def books(self) -> list[list[np.ndarray]]:
        """float32[K_l, width / channels] of every channel and level."""
        return [[book.detach().cpu().float().numpy().copy() for book in q.books] for q in self.quantizers]

    def save(self, folder: Path | str, name: str = "rqvae") -> None:
        """Write <name>.safetensors and then <name>.json (the configuration)."""
        from safetensors.torch import save_file

        folder = Path(folder)
        with atomic_path(folder / f"{name}.safetensors") as temporary:
            save_file({key: value.contiguous().cpu() for key, value in self.state_dict().items()}, temporary)
        write_json(folder / f"{name}.json", asdict(self.config))

    @classmethod
    def load(cls, folder: Path | str, name: str = "rqvae") -> RQVAE:
        """Read a saved model, on the CPU in eval mode. Raises CorruptFile."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        try:
            facts = read_json(folder / f"{name}.json")
            facts["hidden"] = tuple(tuple(widths) for widths in facts["hidden"])
            model = cls(RQVAEConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}))
            model.load_state_dict(load_file(folder / f"{name}.safetensors"))
        except (FileNotFoundError, SafetensorError, TypeError, KeyError, RuntimeError) as error:
            message = str(error).splitlines()[0]
            raise CorruptFile(f"{folder}: no complete RQ-VAE ({message}); train the tokenizer again") from None
        return model.eval()


def nearest(x: Tensor, book: Tensor) -> Tensor:
    """int64[B] nearest entry of book [K, d] for rows x [B, d], float32, without gradient, ties to the lower code.

    The expanded square: torch.cdist is slow or inexact on some devices.
    """
    x, book = x.detach().float(), book.detach().float()
    distance = x.square().sum(1, keepdim=True) - 2 * (x @ book.t()) + book.square().sum(1)
    return distance.argmin(dim=1)


def pair_loss(first: Tensor, second: Tensor, items: Tensor, temperature: float) -> Tensor:
    """Symmetric InfoNCE of the pairs (first_b, second_b), rows [B, d] scaled to length 1; scalar (PLUM).

    items: int64[B, 2]. An item of another pair that equals a member of pair b is no negative for b.
    """
    with float32_region(first.device):
        first = F.normalize(first.float(), dim=1, eps=1e-6)
        second = F.normalize(second.float(), dim=1, eps=1e-6)
        scores = first @ second.t() / temperature
        a, b = items[:, 0], items[:, 1]
        own = torch.eye(len(items), dtype=torch.bool, device=items.device)
        same_second = ((b == a[:, None]) | (b == b[:, None])) & ~own  # column j's second item is in pair b
        same_first = ((a == a[:, None]) | (a == b[:, None])) & ~own
        target = torch.arange(len(items), device=items.device)
        floor = torch.finfo(torch.float32).min / 2
        forward = F.cross_entropy(scores.masked_fill(same_second, floor), target)
        backward = F.cross_entropy(scores.t().masked_fill(same_first, floor), target)
        return (forward + backward) / 2


def build_rqvae(config: RQVAEConfig, seed: int) -> RQVAE:
    """A fresh RQ-VAE whose weights depend on `seed` only, made on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_generator("cpu", "rqvae", seed).initial_seed())
        return RQVAE(config)


def _first_levels(vectors: Tensor, depth: Tensor) -> Tensor:
    """Sum of the first depth [B] vectors of [B, L, d]."""
    kept = torch.arange(vectors.shape[1], device=vectors.device) < depth[:, None]
    return (vectors * kept.unsqueeze(2)).sum(1)


def _mlp(widths: Sequence[int], activation: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n, (inside, outside) in enumerate(itertools.pairwise(widths)):
        layers += [ACTIVATIONS[activation]()] if n else []
        layers.append(nn.Linear(inside, outside))
    return nn.Sequential(*layers)
