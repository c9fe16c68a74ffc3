"""Makes the toy track importable and gives its driver as a fixture."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from toy_track import Toy, block_of, make_config


@pytest.fixture
def toy():
    """Factory: toy(generations, **config changes) runs the controller on the toy track."""

    def make(generations: int, *, trial=block_of, order=None, **changes) -> Toy:
        return Toy(make_config(**changes), trial, order).run(generations)

    return make
