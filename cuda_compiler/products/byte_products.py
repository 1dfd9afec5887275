"""Products of codes of a byte by codes of a byte, as tensor cores multiply them: 8-bit floats, or integers.

Kernels see pairs of neighbours along k as elements of 16 bits: the tiles, the copies and the registers are those of
products in half precision, of half the depth, and only the instruction that multiplies is another one. Scales are the
epilogue's. Where tensor cores have no such instruction, 8-bit floats become float16 in registers, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from cuda_compiler.devices import kept_candidates
from cuda_compiler.packing import CHUNK_BYTES
from cuda_compiler.products.bulk_tilings import BulkTiling, bulk_candidates
from cuda_compiler.products.matvec import as_vectors
from cuda_compiler.tiles.tiling import Asked
from npu_compiler.dtypes import FLOAT8_E4M3FN, FLOAT32, INT8, INT32, DType
from npu_compiler.lowering.candidates import best_candidates
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.forms import Dequantised
from npu_compiler.lowering.problems.operand import Operand, are_chunks
from npu_compiler.lowering.problems.product import Matrix, Product
from npu_compiler.tensor.expr import Call, Expr, Load, substitute

__all__ = ["Bytes", "bulk_byte_tilings", "bytes_of", "in_pairs", "loads_bytes"]


@dataclass(frozen=True)
class Bytes:
    """What kernels need to know of a type of codes.

    Attributes:
        kind: The type.
        pair: Two of them, in kernels.
        file: The file that multiplies pairs.
    """

    kind: DType
    pair: str
    file: str

    def with_sums(self, group: Group) -> Group:
        """A group that takes the sums as warpgroups leave them: those of integers are the bits of integers."""
        problem = group.problem
        if self.kind.is_float or problem is None:
            return group

        def converted(node: Expr) -> Expr | None:
            if not isinstance(node, Load) or node.ref.tensor != problem.result.index:
                return None
            return Call("cast", (Call("bits", (node,), INT32),), FLOAT32)

        return replace(group, expr=substitute(group.expr, converted))


_BYTES: Mapping[DType | None, Bytes] = {
    FLOAT8_E4M3FN: Bytes(FLOAT8_E4M3FN, "float8_pair", "float8_pairs.cuh"),
    INT8: Bytes(INT8, "CodePair", "code_pairs.cuh"),
}


def bytes_of(found: Product) -> Bytes | None:
    """The type of both operands, where both are codes of one that tensor cores multiply."""
    left, right = (operand.kind if isinstance(operand, Dequantised) else None for operand in found.operands)
    return _BYTES.get(left) if left == right else None


def loads_bytes(group: Group, position: int, operand: Operand) -> bool:
    """Whether an operand is codes, as the other one is, that are multiplied as they are."""
    problem = group.problem
    if not isinstance(operand, Dequantised) or not isinstance(problem, Product):
        return False
    if as_vectors(problem, group) is not None:
        return False
    found = problem.with_operand(position, operand)
    return bytes_of(found) is not None and found.batches == 1 and _fits(found.a, found.k) and _fits(found.b, found.k)


def _fits(operand: Matrix, depth: int) -> bool:
    """Whether rows are read 16 bytes at a time, along k."""
    return are_chunks(CHUNK_BYTES, operand.k, (operand.offset, operand.along, depth))


def in_pairs(found: Product) -> Product:
    """The product as one of elements of 16 bits, which kernels read as they lie."""
    for position, operand in enumerate(found.operands):
        found = found.with_operand(position, Operand(operand.tensor, operand.ref))
    a, b = (replace(side, along=side.along // 2, batch=(0,) * len(side.batch)) for side in (found.a, found.b))
    return replace(found, a=a, b=b, k=found.k // 2)


@lru_cache(maxsize=1024)
def bulk_byte_tilings(asked: Asked, device: DeviceModel, whole: bool) -> tuple[BulkTiling, ...]:
    """Tilings by the copy engine; where integers add up, `whole`, of blocks that share no tile."""
    candidates = (found for found in bulk_candidates(asked, device) if found.sizes.splits == 1 or not whole)
    best = best_candidates(candidates, kept_candidates(device, bulk=True))
    return tuple(candidate.sizes for candidate in best)
