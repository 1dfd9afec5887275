"""Logits as a matrix, and what is known of its rows: to find a token, only a few rows are looked at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nextafter
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from npu_compiler.graph.token_matrix import as_matrix

__all__ = ["TokenRows", "place"]

_FEW = 16  # of so many, one


@dataclass(frozen=True, eq=False)
class TokenRows:
    """The logits of all tokens in their order, in rows (`as_matrix`).

    Attributes:
        count: How many tokens there are.
        logits: [rows, columns], floating point; minus infinity behind the last token.
        highest: The highest of each row, float32 [rows]; NaN where one is.
        sums: How probable the tokens of each row are together, relative to the likeliest of all: float32 [rows].
        inverse: 1 / temperature; 0 where only the likeliest is wanted, and `sums` are not looked at.
    """

    count: int
    logits: NDArray[Any]
    highest: NDArray[np.float32]
    sums: NDArray[np.float32]
    inverse: float

    @classmethod
    def of(cls, logits: NDArray[Any], inverse: float) -> Self:
        """From all logits, floating point [V]."""
        rows, columns = as_matrix(len(logits))
        padded = np.full(rows * columns, -np.inf, np.float32)
        padded[: len(logits)] = logits
        matrix = padded.reshape(rows, columns)
        highest = matrix.max(axis=1)
        best, sums = highest.max(), np.zeros(rows, np.float32)
        if inverse and isfinite(best):
            sums = _relative_weights(matrix, best, inverse).sum(axis=1)
        return cls(len(logits), matrix, highest, sums, inverse)

    @cached_property
    def best_logit(self) -> np.float32:
        """The highest of all; NaN where any is."""
        best: np.float32 = self.highest.max()
        return best

    def best(self) -> int:
        """The token with the highest logit, the first of equals."""
        row = int(self.highest.argmax())
        return row * int(self.logits.shape[1]) + int(self._part(row).argmax())

    def total(self) -> float:
        """How probable all tokens are together, relative to the likeliest."""
        return float(self._reached[-1])

    def drawn_row(self, share: float) -> int:
        """The row that a random number, from 0 to below 1, chooses by probability."""
        return place(self._reached, share)

    def drawn_in(self, row: int, share: float) -> int:
        """The token of a row that a random number chooses by probability."""
        reached = self.weights(self._part(row)).cumsum(dtype=np.float64)
        return row * int(self.logits.shape[1]) + place(reached, share)

    def weights(self, logits: NDArray[Any]) -> NDArray[np.float32]:
        """How probable tokens with such logits are, relative to the likeliest of all."""
        return _relative_weights(logits, self.best_logit, self.inverse)

    def number_before(self, token: int) -> int:
        """How many tokens come before one: likelier, or as likely and sooner."""
        return int(np.count_nonzero(self._before(token)[1]))

    def mass_before(self, token: int) -> float:
        """How probable the tokens before one are together."""
        logits, is_before = self._before(token)
        if _FEW * np.count_nonzero(is_before) < is_before.size:
            return float(self.weights(logits[is_before]).sum())
        weights = self.weights(logits)  # to pick many one by one takes longer
        weights *= is_before
        return float(weights.sum())

    def likeliest(self, count: int) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """So many of the likeliest tokens, in order and of equal ones the sooner first, and their logits."""
        rows, columns = self.logits.shape
        if count <= rows:  # as many tokens are no less likely than the last of so many rows' likeliest
            lowest = np.partition(self.highest, rows - count)[rows - count]
        else:
            flat = self.logits.astype(np.float32).reshape(-1)
            lowest = np.partition(flat, flat.size - count)[flat.size - count]
        some = np.flatnonzero(self.highest >= lowest)
        logits = self.logits[some].astype(np.float32).reshape(-1)
        places = np.flatnonzero(logits >= lowest)
        order = places[np.argsort(-logits[places], kind="stable")[:count]]
        return some[order // columns] * columns + order % columns, logits[order]

    def _before(self, token: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """The logits of all rows that have tokens before one, and which those are."""
        row, column = divmod(token, self.logits.shape[1])
        logit = self._logit(token)
        some = np.flatnonzero(self.highest >= logit)
        logits = self.logits[some].astype(np.float32)
        is_before: NDArray[np.bool_] = logits > logit
        own = int(np.searchsorted(some, row))
        is_before[:own] |= logits[:own] == logit
        is_before[own, :column] |= logits[own, :column] == logit
        return logits, is_before

    @cached_property
    def _reached(self) -> NDArray[np.float64]:
        return self.sums.cumsum(dtype=np.float64)

    def _part(self, row: int) -> NDArray[np.float32]:
        part: NDArray[np.float32] = self.logits[row].astype(np.float32)
        return part

    def _logit(self, token: int) -> np.float32:
        return np.float32(self.logits[divmod(token, self.logits.shape[1])])


def _relative_weights(logits: NDArray[Any], best: Any, inverse: float) -> NDArray[np.float32]:
    """How probable tokens are at the temperature 1 / `inverse`, relative to the best, as the device computes it."""
    with np.errstate(over="ignore"):  # models close tokens by the lowest number that there is
        weights: NDArray[np.float32] = logits - best
        weights *= np.float32(inverse)
    return np.exp(weights, out=weights)


def place(reached: NDArray[np.float64], share: float) -> int:
    """The first place where running sums are above a share, below 1, of the last one; never one without weight."""
    whole = float(reached[-1])
    return int(reached.searchsorted(min(share * whole, nextafter(whole, 0.0)), "right"))
