"""How near the outputs of a model come to PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Agreement", "agreement"]

_FEWEST_TO_CORRELATE = 8
_LEAST_SPREAD = 1e-5  # of the largest magnitude; below it the elements are one number and its rounding


class Agreement(NamedTuple):
    """Over all outputs: the smallest correlation, and how many elements differ where they have to be equal."""

    r: float
    mismatched: int


def agreement(wanted: Sequence[NDArray[Any]], found: Sequence[NDArray[Any]]) -> Agreement:
    """Compares outputs in order.

    Floating-point outputs give Pearson's r over their finite elements; those too short or too even for a correlation
    give one minus the relative error. Infinities, integers and booleans have to be equal.

    Raises:
        ValueError: The outputs differ in number or shape.
    """
    if [array.shape for array in wanted] != [array.shape for array in found]:
        shapes = [[array.shape for array in arrays] for arrays in (found, wanted)]
        raise ValueError(f"given outputs of the shapes {shapes[0]}, expected {shapes[1]}")
    lowest, mismatched = 1.0, 0
    for one, other in zip(wanted, found, strict=True):
        if not np.issubdtype(one.dtype, np.floating):
            mismatched += int((one != other).sum())
            continue
        x, y = one.astype(np.float64).ravel(), other.astype(np.float64).ravel()
        finite = np.isfinite(x)
        mismatched += int((np.isfinite(y) != finite).sum())
        both = finite & np.isfinite(y)
        if both.any():
            lowest = min(lowest, _alike(x[both], y[both]))
    return Agreement(float(lowest), mismatched)


def _alike(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    size = np.abs(x).max()
    if x.size < _FEWEST_TO_CORRELATE or x.std() <= _LEAST_SPREAD * size:
        error = np.abs(x - y).max()
        return 1.0 if error == 0 else max(0.0, 1.0 - error / size) if size else 0.0
    return float(np.corrcoef(x, y)[0, 1]) if y.std() else 0.0
