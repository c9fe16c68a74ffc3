"""Dice, the data-adaptive activation of DIN (arXiv:1706.06978, section 5.3), and PReLU with the same start.

p(s) = sigmoid((s - E[s]) / sqrt(Var[s] + eps));   Dice(s) = p(s) s + (1 - p(s)) alpha s
"""

import torch
from torch import Tensor, nn

from auto_research.runtime.precision import float32_region

MOMENTUM = 0.01
EPS = 1e-8
SLOPE = 0.25


class Dice(nn.Module):
    """Dice over the last axis of [..., C].

    Training uses the mean and the biased variance of the batch, over the positions where `valid` [...] is true;
    evaluation uses running averages (momentum 0.01) with bias correction 1 / (1 - 0.99^steps). With fewer than two
    valid positions the running values are used; before the first update these are mean 0 and variance 1.
    Statistics are float32 whatever the input's type.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((channels,), SLOPE))
        self.register_buffer("mean_average", torch.zeros(channels))
        self.register_buffer("variance_average", torch.zeros(channels))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def running(self) -> tuple[Tensor, Tensor]:
        """Bias-corrected running mean and variance, each [C]."""
        seen = self.steps > 0
        weight = torch.where(seen, 1 - (1 - MOMENTUM) ** self.steps.float(), torch.ones_like(self.alpha[0]))
        variance = torch.where(seen, self.variance_average / weight, torch.ones_like(self.variance_average))
        return self.mean_average / weight, variance

    @torch.no_grad()
    def update(self, mean: Tensor, variance: Tensor, enough: Tensor | bool = True) -> None:
        """One step of the running averages; nothing changes where `enough` is false."""
        enough = torch.as_tensor(enough, device=mean.device)
        self.mean_average.lerp_(torch.where(enough, mean, self.mean_average), MOMENTUM)
        self.variance_average.lerp_(torch.where(enough, variance, self.variance_average), MOMENTUM)
        self.steps.add_(enough.long())

    def statistics(self, s: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean and variance used for s [..., C] in the current mode, each [C]; updates the averages in training."""
        running_mean, running_variance = self.running()
        if not self.training:
            return running_mean, running_variance
        flat = s.reshape(-1, s.shape[-1])
        weight = flat.new_ones(len(flat)) if valid is None else valid.reshape(-1).to(flat.dtype)
        count = weight.sum()
        share = weight / count.clamp(min=1)
        mean = share @ flat
        variance = share @ (flat - mean).square()
        enough = count >= 2
        self.update(mean.detach(), variance.detach(), enough)
        return torch.where(enough, mean, running_mean), torch.where(enough, variance, running_variance)

    def forward(self, s: Tensor, valid: Tensor | None = None) -> Tensor:
        kind = s.dtype
        with float32_region(s.device):
            s = s.float()
            mean, variance = self.statistics(s, valid)
            p = torch.sigmoid((s - mean) * (variance + EPS).rsqrt())
            return (s * (self.alpha + (1 - self.alpha) * p)).to(kind)


class PReLU(nn.Module):
    """PReLU per channel: p(s) = 1[s > 0], alpha starts at 0.25; same call as `Dice`."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((channels,), SLOPE))

    def forward(self, s: Tensor, valid: Tensor | None = None) -> Tensor:
        return torch.where(s > 0, s, self.alpha * s)


class Sigmoid(nn.Module):
    """The activation of DIN's released code inside the activation unit; same call as `Dice`."""

    def __init__(self, channels: int):
        super().__init__()

    def forward(self, s: Tensor, valid: Tensor | None = None) -> Tensor:
        return torch.sigmoid(s)


ACTIVATIONS = {"dice": Dice, "prelu": PReLU, "sigmoid": Sigmoid}
