"""Cross entropy over a whole vocabulary without ever holding all logits.

Rows are taken in chunks that stay in cache; gradients of a chunk are formed while its probabilities are at hand, so the
[N, V] matrix is touched once instead of being written, read and written again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from auto_research.runtime.precision import float32_region

CPU_ROWS = 256
ACCELERATOR_ROWS = 8192


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, table: Tensor, target: Tensor, first: int, rows: int) -> Tensor:
        count = len(hidden)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        total = hidden.new_zeros(())
        grad_hidden = torch.empty_like(hidden) if wanted else None
        grad_table = torch.zeros_like(table) if wanted else None
        space = hidden.new_empty(min(rows, count), len(table))
        for start in range(0, count, rows):
            part, goal = hidden[start : start + rows], target[start : start + rows, None]
            logits = torch.mm(part, table.t(), out=space[: len(part)])
            if first:
                logits[:, :first] = -torch.inf
            logits.sub_(logits.amax(1, keepdim=True))
            own = logits.gather(1, goal)
            norm = logits.exp_().sum(1, keepdim=True)
            total += (norm.log() - own).sum()
            if wanted:
                logits.mul_(1.0 / (norm * count))
                logits.scatter_(1, goal, logits.gather(1, goal) - 1.0 / count)
                torch.mm(logits, table, out=grad_hidden[start : start + rows])
                grad_table.addmm_(logits.t(), part)
        if wanted:
            ctx.save_for_backward(grad_hidden, grad_table)
        return total / max(1, count)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad_hidden, grad_table = ctx.saved_tensors
        return grad * grad_hidden, grad * grad_table, None, None, None


def linear_cross_entropy(hidden: Tensor, table: Tensor, target: Tensor, *, first: int = 0) -> Tensor:
    """mean_n -log softmax(hidden_n . table^T)[target_n], equal to F.cross_entropy(hidden @ table.T, target).

    Parameters: hidden [N, D]; table [V, D]; target int64[N]; rows of the table before `first` (padding) are left out of
    the softmax. Float32 inside. Gradients reach hidden and table; a second derivative is not supported.
    """
    with float32_region(hidden.device):
        rows = CPU_ROWS if hidden.device.type == "cpu" else ACCELERATOR_ROWS
        return _LinearCrossEntropy.apply(hidden.float(), table.float(), target, first, rows)
