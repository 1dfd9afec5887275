"""The vectors of a product of few rows: its kernel reads them from memory, or computes them, as the rows of a norm."""

from __future__ import annotations

from dataclasses import dataclass

from cuda_compiler.octets import octet_prologue
from cuda_compiler.rows import vector_prologue
from npu_compiler.artifact.plan import Argument
from npu_compiler.lowering.problems.forms import Computed
from npu_compiler.lowering.problems.product import Matrix
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Prologue

__all__ = ["VECTOR_MACROS", "Vectors", "octets_of", "vectors_of"]

VECTOR_MACROS = "vector_t PROLOGUE VECTOR_PARAMETERS VECTOR_ARGUMENTS ROW_THREADS?"
"""What kernels are told of their vectors: by `Vectors.macros`, and by the prologue that computes them."""


@dataclass(frozen=True)
class Vectors:
    """What a launch gives its kernel for the vectors.

    Attributes:
        inputs: Where they are read from memory.
        prologues: What computes them in each block else.
        by_octets: Whether threads compute eight neighbours of them at a time, without their rows' factors.
    """

    inputs: dict[str, Argument]
    prologues: dict[str, Prologue]
    by_octets: bool = False

    @property
    def macros(self) -> dict[str, object]:
        """What the kernel's file is told, beside their data type."""
        prologue = 2 if self.by_octets else int(bool(self.prologues))
        named = {"VECTOR_PARAMETERS": "const vector_t* vector, ", "VECTOR_ARGUMENTS": "vector, "}
        return {"PROLOGUE": prologue, **named}


def vectors_of(vector: Matrix, lowering: Lowering, threads: int, blocks: int) -> Vectors:
    """The vectors of a launch of so many blocks, of so many threads each, which it binds as ``vector``."""
    if isinstance(vector.operand, Computed):
        return Vectors({}, {"vector": vector_prologue(vector.operand, lowering, threads, blocks)})
    return Vectors({"vector": vector.argument}, {})


def octets_of(vector: Matrix, lowering: Lowering, blocks: int) -> Vectors | None:
    """As what threads of so many blocks compute eight neighbours of; None where their rows do not allow that."""
    prologue = octet_prologue(vector.operand, lowering, blocks) if isinstance(vector.operand, Computed) else None
    return None if prologue is None else Vectors({}, {"vector": prologue}, by_octets=True)
