"""Fixtures every part of the suite may use."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from auto_research.blocks.title_encoder import CHECKPOINT, ENCODED, prepare_encoded
from auto_research.data.checkpoints import fetch_checkpoint
from auto_research.data.prepare import prepare_all
from auto_research.experiment.layout import CHECKPOINTS

# a busy machine is slow, not wrong
settings.register_profile("project", deadline=None)
settings.load_profile("project")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def dataset_dir() -> Path:
    """Folder of downloads: AUTO_RESEARCH_DATASET_DIR or `data/` of the checkout, never of a test's folder."""
    return Path(os.environ.get("AUTO_RESEARCH_DATASET_DIR") or ROOT / "data").resolve()


@pytest.fixture(scope="session")
def movielens_100k(dataset_dir: Path) -> Path:
    """Folder with every prepared table of the real MovieLens-100K, titles and texts too. Read only.

    Prepared once per state of the data code, shared by all workers and later runs.
    """
    code = hashlib.sha256()
    encoder = [ROOT / "src/auto_research/blocks" / name for name in ("title_encoder.py", "language_models.py")]
    registries = [ROOT / "config/datasets.yaml", ROOT / "config/checkpoints.yaml"]
    for path in sorted([*(ROOT / "src/auto_research/data").glob("*.py"), *encoder, *registries]):
        code.update(path.read_bytes())
    folder = dataset_dir / "prepared" / f"movielens-100k-{code.hexdigest()[:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").is_file():
            prepare_all("movielens-100k", folder, dataset_dir)
            checkpoint = dataset_dir / "prepared" / CHECKPOINT
            for table in ENCODED:
                prepare_encoded(table, folder / "canonical", folder / table, checkpoint, dataset_dir)
            (folder / "complete").touch()
    return folder


@pytest.fixture(scope="session")
def pretrained(dataset_dir: Path) -> dict[str, Path]:
    """Folders of the real pretrained models by their need, made once per state of the code that makes them. Read only."""
    code = hashlib.sha256()
    for path in (ROOT / "src/auto_research/data/checkpoints.py", ROOT / "config/checkpoints.yaml"):
        code.update(path.read_bytes())
    folders = {}
    for need, name in CHECKPOINTS.items():
        folder = folders[need] = dataset_dir / "prepared" / f"{name}-{code.hexdigest()[:12]}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / "manifest.json").is_file():
                fetch_checkpoint(name, folder, dataset_dir)
    return folders


@pytest.fixture(scope="session")
def causal_lm(pretrained) -> Path:
    """Folder of the real pretrained language model."""
    return pretrained["causal_lm"]
