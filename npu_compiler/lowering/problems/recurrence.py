"""Recurrent layers over a sequence, as every target's lowering sees them before it divides the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod
from typing import Self

from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.tensor.trace import Anchor, TracedTensor

__all__ = ["Cell", "Recurrence"]


class Cell(Enum):
    """What a step computes, and of how many gates.

    With ``g = gates[t] + weight @ h``, a slice of the hidden size for each gate:

    - LSTM: ``c = sigmoid(f) * c + sigmoid(i) * tanh(g)``, ``h = sigmoid(o) * tanh(c)``, gates in the order i, f, g, o.
    - GRU: ``n = tanh(gates_n + r * (weight_n @ h + bias_n))``, ``h = (1 - z) * n + z * h``, gates in the order r, z, n;
      r and z are sigmoids.
    - TANH, RELU: ``h`` is the function of ``g``.
    """

    LSTM = "lstm"
    GRU = "gru"
    TANH = "tanh"
    RELU = "relu"

    @property
    def gates(self) -> int:
        return {Cell.LSTM: 4, Cell.GRU: 3}.get(self, 1)


@dataclass(frozen=True)
class Recurrence(Problem):
    """``h[t] = step(gates[t], weight @ h[t - 1])`` for each direction; the second one walks from the last step back.

    The result has one dimension: all hidden states [steps, batch, directions, hidden], then, of an LSTM, the last cell
    states [directions, batch, hidden].

    Attributes:
        cell: What a step computes.
        names: What each operand is, in order. By direction (0 or 1 behind the name): ``gates`` [steps, batch, gates *
            hidden], what a step adds to the product; ``weight`` [gates * hidden, hidden]; ``bias`` [hidden] of a GRU,
            inside of its reset. For both: ``hidden`` and ``carried`` [directions, batch, hidden], where h and c do not
            begin as zeros.
        given: The operands.
    """

    kind = "recurrence"
    takes_epilogue = False
    dims = (), (), (0,)

    cell: Cell
    names: tuple[str, ...]
    given: tuple[Operand, ...]

    @classmethod
    def of(cls, result: TracedTensor, anchor: Anchor, operands: Sequence[Operand]) -> Self:
        return cls(result, Cell(anchor.attrs["cell"]), tuple(anchor.attrs["names"]), tuple(operands))

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        return self.given

    def with_operand(self, position: int, operand: Operand) -> Self:
        return replace(self, given=(*self.given[:position], operand, *self.given[position + 1 :]))

    def __getitem__(self, name: str) -> Operand:
        """The operand of a name."""
        return self.given[self.names.index(name)]

    @property
    def directions(self) -> int:
        return 2 if "weight1" in self.names else 1

    @property
    def steps(self) -> int:
        return self["gates0"].shape[0]

    @property
    def batch(self) -> int:
        return self["gates0"].shape[1]

    @property
    def hidden(self) -> int:
        """Size of h and of c."""
        return self["gates0"].shape[2] // self.cell.gates

    @property
    def states(self) -> int:
        """Elements of h, or of c, after one step."""
        return self.directions * self.batch * self.hidden

    @property
    def flops(self) -> int:
        """That of the products with h."""
        return 2 * prod((self.steps, self.states, self.cell.gates, self.hidden))
