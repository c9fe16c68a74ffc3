"""Beam search and sampling of semantic ids, constrained by a prefix trie.

A step function spells one code of every beam:

    step_fn(codes int64[B, w, p], parent int64[B, w], state) -> logits [B, w, V], state

codes are the p codes chosen so far and parent tells which beam of the previous call each one continues, so that a cache
can be reordered; at the first call both are None, w = 1 and state is the caller's ctx. Code k of level l is column
offsets[l] + k of the logits; the other columns count in the softmax only. offsets default to `step_fn.offsets`, else 0.

By default the log-probability of a code is taken over the full vocabulary and THEN masked, so that the score of a path
is the model's own log-probability of it (TIGER, arXiv:2305.05065); with renormalise=True the mask comes first and the
probabilities of all live leaves sum to one. Scores are float32. Equal scores are ordered by their codes, the lower
first, so that devices agree. Lists of `items` ids restart at the root after every L codes and repeat no leaf (OneRec,
arXiv:2502.18965). Nothing here builds a graph; gradients come from `sid_models.sequence_logprob`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auto_research.blocks.prefix_trie import PrefixTrie
from auto_research.blocks.semantic_ids import SIDTable
from auto_research.blocks.sid_models import path_logprob
from auto_research.runtime.errors import NonFinite

StepFunction = Callable[[Tensor | None, Tensor | None, Any], tuple[Tensor, Any]]
NEVER = -torch.inf


class Beams(NamedTuple):
    """Paths of B requests, best first. Where fewer than w exist, the rest has codes -1, leaf -1 and logp -inf.

    codes: int64[B, w, items * L].  logp: float32[B, w] log-probability of the model (renormalised where asked).
    leaf: int64[B, w, items], -1 where the codes name no item.  proposal: float32[B, w] log-probability under the
    distribution that was sampled from; None for a beam search.  parent int64[B, w], state: what the last call of the
    step function gave, for those who continue the paths.
    """

    codes: Tensor
    logp: Tensor
    leaf: Tensor
    proposal: Tensor | None
    parent: Tensor
    state: Any

    def found(self) -> Tensor:
        """bool[B, w]: there is a path (in the unconstrained mode perhaps an invalid one)."""
        return self.logp > NEVER

    def invalid(self) -> Tensor:
        """int64[B]: number of paths that name no item; 0 whenever the trie was obeyed."""
        return (self.found() & (self.leaf < 0).any(-1)).sum(1)


class Expansion(NamedTuple):
    """What an `on_level` hook sees: c candidates that extend the beams by their code at `position` (0-based).

    codes: int64[B, c, position + 1].  logp: float32[B, c] cumulative, -inf for fillers.  parent: int64[B, c] beam they
    extend; state: of the step function, in the order of those beams.
    """

    position: int
    codes: Tensor
    logp: Tensor
    parent: Tensor
    state: Any


@torch.no_grad()
def constrained_beam(
    step_fn: StepFunction,
    ctx: Any,
    trie: PrefixTrie,
    width: int | Sequence[int],
    renormalise: bool = False,
    on_level: Callable[[Expansion], Tensor] | None = None,
    *,
    alive: Tensor | None = None,
    preselect: int = 1,
    branch: int | None = None,
    items: int = 1,
    constrained: bool = True,
    offsets: Sequence[int] | None = None,
) -> Beams:
    """The `width` best paths of every request.

    Parameters
    ----------
    width: beams kept after every code, or one number per code; the last is the w of the answer.
    alive: int32[B, nodes] of `trie.alive`: seen items and inventories. Default: every item.
    on_level: gives a key float[B, c] for the best preselect * width expansions; the width largest keys stay, and only
        logp is carried on (BARGE, arXiv:2607.21028). The answer is ordered by the last keys.
    branch: at most so many children per beam, by log-probability (GR4AD).
    items: ids per path.  constrained=False: the trie and `alive` are not obeyed, only looked up (`Beams.invalid`).

    With width >= live leaves the answer holds every live leaf in the order of its score.
    """
    walk = _Walk(step_fn, ctx, trie, alive, items, offsets, constrained, renormalise)
    widths = [width] * walk.length if isinstance(width, int) else list(width)
    if len(widths) != walk.length or min(widths) < 1 or preselect < 1:
        raise ValueError(f"a beam over {walk.length} codes needs one width >= 1 for all, or one for each, got {width}")
    key = None
    for keep in widths:
        options = walk.options()
        if branch is not None:
            options = options._replace(logp=_largest_only(options.logp, branch))
        total = (walk.logp.unsqueeze(-1) + options.logp).flatten(1)  # (B, w * C)
        if on_level is None:
            index = first_largest(total, keep)
        else:
            pool = first_largest(total, preselect * keep)
            logp = total.gather(1, pool)
            parent, code = walk.read(options, pool)
            key = on_level(Expansion(walk.position, walk.extended(parent, code), logp, parent, walk.state)).float()
            key = torch.where(logp > NEVER, key, NEVER)
            best = first_largest(key, keep)
            key, index = key.gather(1, best), pool.gather(1, best)
        walk.take(options, index, total.gather(1, index))
    return walk.ranked(walk.logp if key is None else key, widths[-1])


@torch.no_grad()
def sample_paths(
    step_fn: StepFunction,
    ctx: Any,
    trie: PrefixTrie,
    samples: int,
    *,
    alive: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    distinct: bool = False,
    items: int = 1,
    constrained: bool = True,
    renormalise: bool = False,
    offsets: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> Beams:
    """`samples` random paths of every request, from softmax(logits / temperature) over the allowed codes.

    top_k: of every softmax, only the k most likely codes.  distinct: without replacement, by a stochastic beam search
    (Gumbel-top-k over whole paths, arXiv:1903.06059), in the order drawn; else independent draws.
    generator: a CPU generator; noise is drawn there, so every device draws the same paths. `proposal` holds the
    log-probabilities under the sampling distribution, `logp` those of the model at temperature 1: over the full
    vocabulary, or with renormalise=True over the allowed codes. Other parameters as in `constrained_beam`.
    """
    if temperature <= 0 or samples < 1 or (top_k is not None and top_k < 1):
        raise ValueError(f"need temperature > 0, samples >= 1, top_k >= 1, got {temperature}, {samples}, {top_k}")
    walk = _Walk(step_fn, ctx, trie, alive, items, offsets, constrained, renormalise)
    proposal = perturbed = None
    for _ in range(walk.length):
        options = walk.options()
        policy = _log_softmax(options.raw / temperature, options.allowed)
        if top_k is not None:
            policy = _log_softmax(policy, _largest_only(policy, top_k) > NEVER)
        batch, beams, columns = policy.shape
        if proposal is None:
            proposal, perturbed = policy.new_zeros(batch, 1), policy.new_zeros(batch, 1)
        path = proposal.unsqueeze(-1) + policy
        if distinct:
            noisy = path + _gumbel(path.shape, generator, path.device)
            score = _conditioned(noisy, perturbed.unsqueeze(-1))
            score = torch.where((path > NEVER) & (perturbed > NEVER).unsqueeze(-1), score, NEVER).flatten(1)
            index = first_largest(score, samples)
            perturbed = score.gather(1, index)
        else:
            noise = _gumbel((batch, samples, columns), generator, path.device)
            column = (policy + noise).argmax(-1)  # (B, samples)
            beam = torch.arange(samples, device=path.device) if beams == samples else column.new_zeros(samples)
            index = beam * columns + column
        proposal = path.flatten(1).gather(1, index)
        walk.take(options, index, (walk.logp.unsqueeze(-1) + options.logp).flatten(1).gather(1, index))
    rank = perturbed if distinct else torch.where(walk.logp > NEVER, 0.0, NEVER)
    return walk.ranked(rank, samples, proposal)


@torch.no_grad()
def exhaustive_sid_scores(model, ctx: Any, table: SIDTable, *, chunk: int = 1024) -> Tensor:
    """Log-probability float32 [B, n_items + 1] of every item, column 0 -inf, by teacher forcing of every tuple.

    The oracle of the searches: model as in `sid_models.path_logprob`, `chunk` tuples of every request at a time.
    """
    device = next(model.parameters()).device
    leaves = torch.from_numpy(table.leaves).to(device)
    parts = [path_logprob(model, ctx, part.unsqueeze(0)) for part in leaves.split(chunk)]
    scores = torch.cat(parts, dim=1)[:, torch.from_numpy(table.leaf_of[1:]).to(device)]
    return torch.nn.functional.pad(scores, (1, 0), value=NEVER)


def first_largest(scores: Tensor, count: int) -> Tensor:
    """Ascending positions int64 [B, min(count, N)] of the largest of scores [B, N]; of equal ones the first are taken.

    topk does not say which of equal scores it takes; where that matters (a tie at the border) a stable sort decides.
    """
    if count >= scores.shape[1]:
        return torch.arange(scores.shape[1], device=scores.device).expand(len(scores), -1)
    value, index = scores.topk(count + 1, dim=1)
    tied = (value[:, count - 1] == value[:, count]) & (value[:, count] > NEVER)
    index = index[:, :count]
    if tied.any():
        index = torch.where(
            tied.unsqueeze(1), scores.sort(dim=1, descending=True, stable=True).indices[:, :count], index
        )
    return index.sort(1).values


class _Options(NamedTuple):
    """Codes that may follow each beam: raw logits, log-probabilities (-inf: forbidden) and allowed [B, w, C]."""

    raw: Tensor
    logp: Tensor
    allowed: Tensor
    code: Tensor
    child: Tensor | None


class _Walk:
    """The paths of all requests on their way down; beams are kept in lexicographic order of their codes."""

    def __init__(self, step_fn, ctx, trie, alive, items, offsets, constrained, renormalise):
        if items < 1:
            raise ValueError(f"a path holds at least one item, not {items}")
        self.step_fn, self.state, self.trie, self.alive = step_fn, ctx, trie, alive
        offsets = getattr(step_fn, "offsets", None) if offsets is None else offsets
        self.offsets = [0] * trie.levels if offsets is None else [int(o) for o in offsets]
        self.constrained, self.renormalise, self.length = constrained, renormalise, items * trie.levels
        self.position = 0
        self.codes = self.parent = self.logp = self.node = self.leaf = None

    def options(self) -> _Options:
        logits, self.state = self.step_fn(self.codes, self.parent, self.state)
        logits = logits.float()  # (B, w, V)
        if self.logp is None:
            batch = len(logits)
            self.logp = logits.new_zeros(batch, 1)
            self.node = torch.zeros(batch, 1, dtype=torch.int64, device=logits.device)
            self.codes = self.leaf = self.node.new_zeros(batch, 1, 0)
        level = self.position % self.trie.levels
        if not self.constrained:
            columns = logits.shape[
                -1
            ]  # a column of another level keeps a code of its own, which the trie does not know
            code = (torch.arange(columns, device=logits.device) - self.offsets[level]) % columns
            logp = logits.log_softmax(-1)
            return _Options(logits, logp, logp > NEVER, code.expand_as(logits), None)
        child, allowed = self.trie.children(self.node, level)
        left = self.trie.leaves[child] if self.alive is None else _gather(self.alive, child)
        if self.leaf.shape[2]:  # leaves this very path has used up
            used = self.trie.path[self.leaf.clamp(min=0), level].masked_fill(self.leaf < 0, -1)
            left = left - (child.unsqueeze(-1) == used.unsqueeze(-2)).sum(-1)
        allowed = allowed & (left > 0)
        code = self.trie.code[child]
        raw = logits.gather(-1, code + self.offsets[level])
        if self.renormalise:
            return _Options(raw, _log_softmax(raw, allowed), allowed, code, child)
        logp = raw - logits.logsumexp(-1, keepdim=True)
        return _Options(raw, logp.masked_fill(~allowed, NEVER), allowed, code, child)

    def read(self, options: _Options, index: Tensor) -> tuple[Tensor, Tensor]:
        """Beam and code of flat choices [B, c]."""
        return index // options.code.shape[2], options.code.flatten(1).gather(1, index)

    def extended(self, parent: Tensor, code: Tensor) -> Tensor:
        return torch.cat([_rows(self.codes, parent), code.unsqueeze(-1)], dim=-1)

    def take(self, options: _Options, index: Tensor, logp: Tensor) -> None:
        """Go on with flat choices [B, c]; a path with logp -inf has ended."""
        level = self.position % self.trie.levels
        self.parent, code = self.read(options, index)
        self.codes = self.extended(self.parent, code)
        if options.child is None:
            node = self.trie.step(self.node.gather(1, self.parent), code, level)
        else:
            node = options.child.flatten(1).gather(1, index)
        self.node = node.masked_fill(logp == NEVER, -1)
        self.leaf, self.logp = _rows(self.leaf, self.parent), logp
        self.position += 1
        if self.position % self.trie.levels == 0:
            self.leaf = torch.cat([self.leaf, self.trie.leaf(self.node).unsqueeze(-1)], dim=-1)
            self.node = torch.zeros_like(self.node).masked_fill(logp == NEVER, -1)

    def ranked(self, key: Tensor, width: int, proposal: Tensor | None = None) -> Beams:
        """The paths in order of the key, filled up to the width."""
        if self.logp.isnan().any():
            raise NonFinite("the logits of a search over semantic ids are not numbers")
        order = key.sort(dim=1, descending=True, stable=True).indices
        logp = self.logp.gather(1, order)
        lost = (logp == NEVER).unsqueeze(-1)
        codes, leaf = _rows(self.codes, order).masked_fill(lost, -1), _rows(self.leaf, order).masked_fill(lost, -1)
        parent = self.parent.gather(1, order)
        if proposal is not None:
            proposal = _fill(proposal.gather(1, order), width, NEVER)
        return Beams(
            _fill(codes, width, -1), _fill(logp, width, NEVER), _fill(leaf, width, -1), proposal,
            _fill(parent, width, 0), self.state,
        )  # fmt: skip


def _gather(table: Tensor, index: Tensor) -> Tensor:
    """table [B, N] read at index [B, ..]."""
    return table.gather(1, index.flatten(1)).view_as(index)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x [B, w, n] at beams index [B, c] -> [B, c, n]."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))


def _fill(x: Tensor, width: int, value: float) -> Tensor:
    """x [B, w, ..] with w filled up to the width."""
    if x.shape[1] == width:
        return x
    return torch.cat([x, x.new_full((len(x), width - x.shape[1], *x.shape[2:]), value)], dim=1)


def _log_softmax(logits: Tensor, allowed: Tensor) -> Tensor:
    """log_softmax over the allowed entries of the last axis, -inf elsewhere; rows without any give -inf."""
    masked = logits.masked_fill(~allowed, NEVER)
    total = masked.logsumexp(-1, keepdim=True)
    return (masked - total.masked_fill(total == NEVER, 0.0)).masked_fill(~allowed, NEVER)


def _largest_only(scores: Tensor, count: int) -> Tensor:
    """scores [B, w, C] with all but the `count` largest of every row at -inf."""
    flat = scores.flatten(0, 1)
    index = first_largest(flat, count)
    return torch.full_like(flat, NEVER).scatter(1, index, flat.gather(1, index)).view_as(scores)


def _gumbel(shape: Sequence[int], generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Standard Gumbel noise, drawn on the CPU."""
    draws = torch.empty(tuple(shape), dtype=torch.float32).exponential_(generator=generator)
    return -draws.clamp(min=torch.finfo(torch.float32).tiny).log().to(device)


def _conditioned(noisy: Tensor, maximum: Tensor) -> Tensor:
    """Gumbel variables noisy [.., C], given that their maximum is `maximum` [.., 1] (arXiv:1903.06059, appendix B)."""
    gap = (noisy - noisy.amax(-1, keepdim=True)).clamp(max=0)
    v = maximum - noisy + torch.log1p(-gap.exp())
    return maximum - v.relu() - torch.log1p((-v.abs()).exp())
