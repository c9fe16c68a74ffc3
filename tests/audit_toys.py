"""Toy adapters for audits: a folder with a card, nothing listed anywhere else."""

from pathlib import Path

CARD = """\
key: {key}
paper: {{title: Toy {key}, id: "none:0", organization: nobody, published: "2026", topics: [toy]}}
fidelity: {fidelity}
family: toy
task: next_item
problem: Nothing.
boundary: []
data: {{default: movielens-100k, needs: []}}
metrics: {{primary: loss, direction: min}}
arms:
  treatment: {{role: treatment, what: a sum on the device, needs: []}}
  control: {{role: control, what: another sum, needs: []}}
comparisons: [{{arm: treatment, against: control}}]
budgets:
  tiny: {{seeds: [42]}}
  smoke: {{seeds: [42]}}
  standard: {{seeds: [42]}}
  full: {{seeds: [42]}}
gpu: {{path: {path}}}
"""

GOOD = """\
import torch

from auto_research.experiment.contract import Experiment, Measurement
from auto_research.runtime.devices import device_for

experiment = Experiment("{key}")


@experiment.arm
def treatment(ctx):
    device = device_for(ctx.device)
    return Measurement(metrics={{"loss": float(torch.ones(3, device=device).sum())}})


@experiment.arm
def control(ctx):
    return Measurement(metrics={{"loss": 4.0}})
"""

RAISES = GOOD.replace('    return Measurement(metrics={{"loss": 4.0}})', '    raise RuntimeError("planted failure")')
HANGS = GOOD.replace('    return Measurement(metrics={{"loss": 4.0}})', "    while True:\n        pass")
NO_DEVICE = GOOD.replace("device = device_for(ctx.device)", 'device = "cpu"').replace(
    "from auto_research.runtime.devices import device_for\n", ""
)


def plant(root: Path, key: str, body: str = GOOD, *, fidelity: str = "core_mechanism", path: bool = True) -> Path:
    """Write adapter `key` below `root`; returns its folder."""
    folder = root / "adapters" / key.replace("-", "_")
    folder.mkdir(parents=True, exist_ok=True)
    (root / "adapters" / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "card.yaml").write_text(CARD.format(key=key, fidelity=fidelity, path=str(path).lower()), encoding="utf-8")
    (folder / "experiment.py").write_text(body.format(key=key), encoding="utf-8")
    return folder
