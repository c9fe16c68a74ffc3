"""The training optimizer is torch's AdamW, bit for bit, and a training process does not pay for the compiler."""

import subprocess
import sys

import torch

from auto_research.train.optimizer import AdamW

STEP = """
import sys, torch
from auto_research.train.optimizer import adamw
layer = torch.nn.Linear(4, 2)
optimizer = adamw(layer, 0.1, 0.01)
optimizer.zero_grad()
layer(torch.ones(3, 4)).square().sum().backward()
torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
"""


def weights(kind, fused):
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 3)
    optimizer = kind(layer.parameters(), lr=0.05, weight_decay=0.1, fused=fused)
    for round_ in range(4):
        optimizer.zero_grad()
        layer(torch.ones(5, 6) * round_).square().sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return layer.weight.detach()


def test_same_numbers_as_torch():
    for fused in (False, True):
        assert torch.equal(weights(AdamW, fused), weights(torch.optim.AdamW, fused))


def test_a_training_step_does_not_import_the_compiler():
    answer = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
