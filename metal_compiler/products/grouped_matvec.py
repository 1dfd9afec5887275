"""Matrices in packed codes with groups, which become numbers on their way into a product of few rows, or of many."""

from __future__ import annotations

from metal_compiler.anchors import single_launch
from metal_compiler.dialect import METAL
from metal_compiler.products.prologue import row_groups, vector_prologue
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT16, INT8
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.anchors import pointer_macros
from npu_compiler.lowering.dialect import LeafNames
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.operands import Operands, Pointer
from npu_compiler.lowering.problems.forms import Computed, GroupedCodes
from npu_compiler.lowering.problems.operand import Operand, are_chunks
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch, Prologue

__all__ = [
    "GROUPED_MATVEC",
    "CODE_MACROS",
    "MAX_ROWS",
    "group_prologue",
    "loads_grouped_codes",
    "lower_grouped_vectors",
    "units_of",
]

CODE_MACROS = (
    "UNIT? CODE_BITS? CODE_IS_SIGNED? CODE_IS_FLOAT? HALF_SHIFT? GROUP_SIZE? BLOCK_ROWS? SCALE_FACTOR? HAS_OFFSET? "
    "ZERO_BITS? ZERO? SCALES? ZEROS? BIASES? CODEBOOK? CODE_PARAMETERS? CODE_ARGUMENTS?"
)
"""What `group_prologue` defines for a kernel's file."""

GROUPED_MATVEC = KernelTemplate(
    "grouped_matvec",
    params="int outputs, k, vector_row, vector_k",
    macros=f"{CODE_MACROS} vector_t VECTOR_CHUNK VECTORS SIMDGROUPS ROUNDS PROLOGUE? COMPUTE_VECTOR? VECTOR_CAPACITY?",
    inputs="matrix vector codes?",
    threads=lambda macros: 32 * macros["SIMDGROUPS"],
    computed="vector codes",
)

MAX_ROWS = 4
"""Rows of a product that `grouped_matvec.metal` computes at a time."""

_LANES = 32
_UNITS = (16, 8)  # bytes of a unit
_PREFIX = "w"
_WASTE = 1.1  # of lanes without a unit in the last pass, for which loads of 16 bytes make up
_VECTOR = 4
_HALF_SHIFTS = {FLOAT8_E4M3FN: 7, FLOAT8_E5M2: 8}  # from the magnitude of an 8-bit float to that of a half
_HALF_FACTORS = {FLOAT8_E4M3FN: 256.0, FLOAT8_E5M2: 1.0}  # and of the half to the number


def loads_grouped_codes(group: Group, position: int, operand: Operand) -> bool:
    """Whether an operand is the right matrix of a product, in codes of four bits or eight that kernels take by units.

    Codes of a byte with one scale for each row, or for all, are not among them: `loads_codes` has these.
    """
    problem = group.problem
    if not isinstance(operand, GroupedCodes) or not isinstance(problem, Product) or position != 1:
        return False
    if operand.bits not in (4, 8) or (operand.codebook is not None and operand.bits != 4):
        return False
    if operand.codebook is not None and operand.codebook.strides[-1] != 1:
        return False
    if operand.bits == 8 and operand.group >= problem.k and operand.rows == 1:
        return False
    is_float = operand.number in _HALF_SHIFTS
    if is_float and (operand.zeros is not None or not operand.is_constant):
        return False  # what is no weight may be NaN
    if problem.batches != 1 or problem.a.dtype not in (FLOAT16, BFLOAT16) or operand.zero_bits not in (4, 8):
        return False
    return bool(units_of(operand, problem.k))


def units_of(codes: GroupedCodes, k: int) -> tuple[int, ...]:
    """How many neighbours along k a thread may take at a time: as many as 16 bytes hold, or 8, where they lie so.

    Args:
        codes: The operand, the right matrix of a product.
        k: The length of a row.
    """
    found = []
    for size in _UNITS:
        unit, is_whole = 8 * size // codes.bits, are_chunks(size, 1, (codes.offset, codes.strides[-1]))
        if is_whole and k > 0 and k % unit == 0 and (codes.group >= k or codes.group % unit == 0):
            found.append(unit)
    return tuple(found)


def _unit(codes: GroupedCodes, k: int) -> int:
    """The unit by which the lanes of a simdgroup stride over a row: the larger one, unless too many go without."""
    units = units_of(codes, k)
    along = [ceil_div(k // unit, _LANES) * unit for unit in units]
    return units[0] if along[0] <= _WASTE * along[-1] else units[-1]


def group_prologue(codes: GroupedCodes, unit: int, k: int) -> Prologue:
    """What makes numbers of codes in a kernel: ``grouped_codes.metal``, and what that is told.

    Args:
        codes: The operand, the right matrix of a product.
        unit: One of `units_of`.
        k: The length of a row.
    """
    parts = {"SCALES": codes.scale, "ZEROS": codes.zeros, "BIASES": codes.bias, "CODEBOOK": codes.codebook}
    there = [(name, part) for name, part in parts.items() if part is not None]
    pointers = tuple(Pointer(part.argument, part.dtype) for _, part in there)
    operands = Operands((), pointers, LeafNames({}, {}, {}, {}), (), "0", {}, _PREFIX)
    factor = _HALF_FACTORS.get(codes.number, 1.0)
    macros: dict[str, object] = {
        "UNIT": unit,
        "CODE_BITS": codes.bits,
        "CODE_IS_SIGNED": int(codes.number == INT8),
        "CODE_IS_FLOAT": int(codes.number in _HALF_SHIFTS),
        "HALF_SHIFT": _HALF_SHIFTS.get(codes.number, 0),
        "GROUP_SIZE": 0 if codes.group >= k else codes.group,
        "BLOCK_ROWS": codes.rows,
        "SCALE_FACTOR": f"{factor}f",
        "HAS_OFFSET": int(codes.zeros is not None or codes.bias is not None or codes.zero != 0),
        "ZERO_BITS": 0 if codes.zeros is None else codes.zero_bits,
        "ZERO": f"{codes.zero / factor}f",
        **pointer_macros("CODE", operands, METAL),
        **{name: f"{_PREFIX}e{number}" for number, (name, _) in enumerate(there)},
    }
    values = {"code_row": codes.strides[-1]}
    for name, part in (("scale", codes.scale), ("zero", codes.zeros), ("bias", codes.bias)):
        along_groups, along_rows = (0, 0) if part is None else part.strides[-2:]
        values |= {f"{name}_row": along_rows, f"{name}_group": along_groups}
    return Prologue((operands,), values, macros, files=("grouped_codes.metal",))


def lower_grouped_vectors(found: Product, group: Group, lowering: Lowering) -> list[KernelCall]:
    """A product of few rows by a matrix in codes."""
    codes, vectors = found.b.operand, found.a
    assert isinstance(codes, GroupedCodes)
    unit = _unit(codes, found.k)
    prologues = {"codes": group_prologue(codes, unit, found.k)}
    inputs = {"matrix": codes.argument}
    row, step = vectors.along, vectors.k
    aligned = [vectors.offset, *([row] if found.m > 1 else [])]
    if isinstance(vectors.operand, Computed):
        prologues["vector"] = vector_prologue(vectors.operand, lowering)
        row, step, aligned = 0, 1, []
    else:
        inputs["vector"] = vectors.argument
    groups, shared = row_groups(found.n, is_computed="vector" in prologues)
    macros = {
        "vector_t": METAL.storage[vectors.dtype.name],
        "VECTOR_CHUNK": _VECTOR if are_chunks(_VECTOR, step, aligned) else 1,
        "VECTORS": found.m,
        **shared,
    }
    launch = Launch(
        GROUPED_MATVEC,
        grid=(groups, 1, 1),
        values={"outputs": found.n, "k": found.k, "vector_row": row, "vector_k": step},
        macros=macros,
        inputs=inputs,
        flops=found.flops,
        prologues=prologues,
    )
    return [single_launch(launch, group, lowering)]
