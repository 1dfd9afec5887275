"""What every test shares: caches of its own and a fixed seed."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed, so that a failure can be repeated."""
    return np.random.default_rng(0)
