"""Objectives of preference alignment over log-probabilities of generated sequences, and rewards made advantages.

Every loss is per row, float32, without a mean: the caller averages, weights and adds the likelihood loss. Notation:
pi = exp(logp) of the policy, pi_old of the frozen snapshot that made the sample, A the advantage. Inputs of any shape
that broadcast: rows [B] for whole sequences, [B, L] with A [B, 1] for one rule per token. Log-probabilities must come
from `token_logprobs`, `logprob_of_logits` or `sid_models.sequence_logprob`, with dropout off on both sides of a ratio.
"""

from __future__ import annotations

import copy
import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auto_research.runtime.precision import float32_region

SMALLEST = 1e-8


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """float32[..] log-softmax of logits [.., V] at tokens int64[..]."""
    with float32_region(logits.device):
        logits = logits.float()
        chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return chosen - torch.logsumexp(logits, dim=-1)


def logprob_of_logits(logits: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """float32[B] sum over positions of the log-probability of tokens int64[B, L] under logits [B, L, V].

    mask: bool[B, L], False at positions that are not counted (padding, inserted BOS).
    """
    values = token_logprobs(logits, tokens)
    if mask is not None:
        values = values.masked_fill(~mask, 0.0)
    return values.sum(dim=-1)


def frozen_reference(model: nn.Module) -> nn.Module:
    """A copy of `model` in eval mode whose parameters take no gradient: reference or snapshot of a policy."""
    reference = copy.deepcopy(model).eval()
    return reference.requires_grad_(False)


def weights_hash(model: nn.Module) -> str:
    """sha256 over names, shapes, dtypes and bytes of the state; equal before and after shows a model did not move."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        value = value.detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def dpo(winner: Tensor, loser: Tensor, reference_winner: Tensor, reference_loser: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta [(lw - rw) - (ll - rl)]) of log-probabilities (DPO; OneRec, arXiv:2502.18965).

    ln 2 where policy and reference agree. The reference carries no gradient.
    """
    with float32_region(winner.device):
        return -F.logsigmoid(dpo_margin(winner, loser, reference_winner, reference_loser, beta))


def dpo_margin(winner: Tensor, loser: Tensor, reference_winner: Tensor, reference_loser: Tensor, beta: float) -> Tensor:
    """beta [(lw - rw) - (ll - rl)], float32: the implied reward gap, positive where the policy agrees with the pair."""
    gained = winner.float() - reference_winner.detach().float()
    return beta * (gained - (loser.float() - reference_loser.detach().float()))


def gbpo(logp: Tensor, logp_old: Tensor, advantage: Tensor) -> Tensor:
    """Gradient-bounded policy optimisation (OneRec-V2, arXiv:2508.20900): -pi / D * A.

    D = max(pi_old, sg pi) for A > 0 and max(pi_old, 1 - sg pi) for A < 0, without gradient, so that the gradient to pi
    is never steeper than that of binary cross-entropy: 1 / pi and 1 / (1 - pi). No sample is clipped away. A = 0 gives
    exactly zero loss and gradient.
    """
    with float32_region(logp.device):
        logp, old = logp.float(), logp_old.detach().float()
        now = logp.detach()
        # A > 0 in logarithms: pi and pi_old of long sequences underflow, their ratio does not.
        rising = torch.exp(logp - torch.maximum(old, now))
        falling = torch.exp(logp) / torch.maximum(old.exp(), -torch.expm1(now)).clamp(min=SMALLEST)
        return -_signed(rising, falling, advantage)


def ecpo(logp: Tensor, logp_old: Tensor, advantage: Tensor, clip: float = 0.2, slack: float = 0.1) -> Tensor:
    """Early-clipped policy optimisation (OneRec technical report, arXiv:2506.13695): the clipped objective of `grpo`
    with pi_old' = max(pi_old, sg pi / (1 + clip + slack)) for A < 0, which bounds the ratio, and so the gradient, of
    samples the policy is to avoid by 1 + clip + slack.
    """
    with float32_region(logp.device):
        old = logp_old.detach().float()
        early = torch.maximum(old, logp.detach().float() - math.log(1 + clip + slack))
        return grpo(logp, torch.where(advantage < 0, early, old), advantage, clip)


def grpo(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    clip: float = 0.2,
    kl: float = 0.0,
    logp_reference: Tensor | None = None,
) -> Tensor:
    """-min(rho A, clip(rho, 1 - clip, 1 + clip) A) + kl * k3, rho = pi / pi_old (PPO-clip with group advantages, GRPO).

    kl > 0 needs logp_reference, the frozen model's log-probabilities of the same sequences.
    """
    with float32_region(logp.device):
        advantage = advantage.float()
        # A ratio beyond e^20 is never inside the clip; without the bound inf * 0 would make NaN at A = 0.
        ratio = torch.exp((logp.float() - logp_old.detach().float()).clamp(max=20.0))
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        if kl:
            if logp_reference is None:
                raise ValueError("grpo with a KL term needs the reference's log-probabilities")
            loss = loss + kl * k3(logp, logp_reference)
        return loss


def k3(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log pi_ref - log pi: never negative, its mean under pi is KL(pi || pi_ref)."""
    with float32_region(logp.device):
        gap = logp_reference.detach().float() - logp.float()
        return torch.expm1(gap) - gap


def group_adv(reward: Tensor, eps: float = 1e-6, flat: float = 1e-6) -> Tensor:
    """(r - mean) / (std + eps) inside groups, reward [.., G], population std, float32.

    Exactly zero where all rewards of a group are equal or their std is at most `flat`.
    """
    with float32_region(reward.device):
        reward = reward.float()
        centred = reward - reward.mean(dim=-1, keepdim=True)
        std = centred.square().mean(dim=-1, keepdim=True).sqrt()
        equal = (reward.amax(-1, keepdim=True) == reward.amin(-1, keepdim=True)) | (std <= flat)
        return torch.where(equal, torch.zeros_like(centred), centred / (std + eps))


def _signed(rising: Tensor, falling: Tensor, advantage: Tensor) -> Tensor:
    """rising * A where A > 0, falling * A where A < 0, exactly 0 (and no gradient) where A = 0."""
    advantage = advantage.float()
    rising, falling, advantage = torch.broadcast_tensors(rising, falling, advantage)
    chosen = torch.where(advantage > 0, rising, torch.where(advantage < 0, falling, torch.zeros_like(rising)))
    return chosen * advantage
