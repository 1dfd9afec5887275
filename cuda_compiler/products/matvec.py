"""Lowers products with at most eight rows, or columns: the other operand is read once, at the pace of the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.dialect import CUDA
from cuda_compiler.early_launches import EarlyLaunch
from cuda_compiler.products.codes import CODE_MACROS, code_function
from cuda_compiler.products.product import offset_function
from cuda_compiler.products.vectors import VECTOR_MACROS, vectors_of
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16, FLOAT32
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.candidates import THE_BEST, Candidate, best_candidates
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.forms import Computed, Dequantised, is_vector
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Matrix, Product
from npu_compiler.lowering.templates import KernelTemplate
from npu_compiler.tensor.expr import Load

__all__ = ["MATVEC", "as_vectors", "lower_vectors", "loads_vector"]

_MAX_VECTORS = 8
_WARPS = 8
_LOAD_BYTES = 16
_MAX_STAGED_BYTES = 40 * 1024  # of shared memory for the vectors


@dataclass(frozen=True)
class _Costs(FamilyConstants, family="few_vectors"):
    """What decides how threads share the work.

    Attributes:
        blocks: Blocks of a multiprocessor, as many as its registers hold.
        in_flight: Loads of 16 bytes that a thread has on their way.
        share_cost: What it costs to put the parts of several warps together, in loads.
    """

    blocks: int
    in_flight: int
    share_cost: int

    @property
    def held_bytes(self) -> int:
        """Bytes of a matrix that one block has on their way."""
        return 32 * _WARPS * self.in_flight * _LOAD_BYTES


MATVEC = KernelTemplate(
    "matvec",
    params="int outputs, chunks, batches, matrix_row, vector_row",
    macros=(
        "matrix_t COMMON VECTORS OUTPUTS LANES WARPS_K DEPTH LOAD BY_ROW STAGED MATRIX_CONSTANT HURRIES "
        f"{VECTOR_MACROS} {CODE_MACROS}"
    ),
    inputs="matrix vector codes?",
    threads=32 * _WARPS,
    files="streamed_loads.cuh",
    computed="vector codes",
)


@dataclass(frozen=True)
class _Vectors:
    """A product as a matrix, whose rows are contiguous, by vectors; `by_row` if the vectors are rows of the result."""

    matrix: Matrix
    vector: Matrix
    count: int
    outputs: int
    by_row: bool


@dataclass(frozen=True)
class _Work:
    """What threads share.

    Attributes:
        load: Elements of a load.
        k: Elements of a row.
        outputs: Rows that threads do together.
        chunks: So many rows at a time make the whole matrix.
        blocks_each: Blocks of a multiprocessor.
    """

    load: int
    k: int
    outputs: int
    chunks: int
    blocks_each: int


@dataclass(frozen=True)
class _Shape:
    """How threads share the work.

    Attributes:
        load: Elements of a load.
        lanes, warps_k: Threads of a warp, and warps, that share a row.
        outputs: Rows that they do together.
        depth: Loads of each of these rows that are on their way.
    """

    load: int
    lanes: int
    warps_k: int
    outputs: int
    depth: int

    @property
    def groups(self) -> int:
        """Groups of threads in a block."""
        return _WARPS // self.warps_k * (32 // self.lanes)


def loads_vector(group: Group, position: int, operand: Operand) -> bool:
    """Whether an operand is the one row of a group's product, which each block of its kernel can compute."""
    if not is_vector(operand, group.problem, position, _MAX_STAGED_BYTES):
        return False
    # rows of another tensor are read where they lie, instead of being copied first
    return operand.is_of_rows or isinstance(operand.expr, Load)


def as_vectors(found: Product, group: Group) -> _Vectors | None:
    """The product as one by vectors; None where it is none."""
    left, right = (isinstance(operand, Dequantised) for operand in found.operands)
    numbers = [part.dtype for part, is_codes in ((found.a, left), (found.b, right)) if not is_codes]
    if not {*numbers} <= {FLOAT16, BFLOAT16, FLOAT32}:
        return None
    if (
        found.m <= _MAX_VECTORS
        and not left
        and found.b.k == 1
        and (found.a.k == 1 or isinstance(found.a.operand, Computed))
    ):
        return _Vectors(found.b, found.a, found.m, found.n, True)
    if found.n <= _MAX_VECTORS and not right and found.a.k == found.b.k == 1 and group.pairs == 1:
        return _Vectors(found.a, found.b, found.n, found.m, False)
    return None


def lower_vectors(vectors: _Vectors, found: Product, around: AnchoredGroup) -> KernelCall:
    """One launch, of as many blocks as the device has multiprocessors, or fewer."""
    matrix, vector, batches = vectors.matrix, vectors.vector, found.batches
    pairs, size = around.group.pairs, around.pack_size() if vectors.by_row else 1
    outputs, device = pairs * min(size, 2 if vectors.count <= 4 else 1), around.device
    shape = _shape(vectors, found, outputs, device)
    store = max(1, min(size, shape.outputs // pairs))
    chunks = ceil_div(vectors.outputs, shape.outputs)
    blocks_each = _blocks_each(vectors, found, device)
    codes = code_function(found, around.lowering)
    hurries = matrix.is_constant and blocks_each == 1
    staged = batches == 1 and vectors.count * found.k * vector.dtype.size <= _MAX_STAGED_BYTES
    blocks = min(chunks * batches, device.cores * blocks_each)
    bound = vectors_of(vector, around.lowering, 32 * _WARPS, blocks)
    macros: dict[str, object] = {
        "matrix_t": CUDA.storage[matrix.dtype.name],
        "vector_t": CUDA.storage[vector.dtype.name],
        "COMMON": found.k,
        "VECTORS": vectors.count,
        "OUTPUTS": shape.outputs,
        "LANES": shape.lanes,
        "WARPS_K": shape.warps_k,
        "DEPTH": shape.depth,
        "LOAD": shape.load,
        "BY_ROW": int(vectors.by_row),
        "STAGED": int(staged),
        "MATRIX_CONSTANT": int(matrix.is_constant),
        "HURRIES": int(hurries),
        **bound.macros,
        **codes.macros,
    }
    values = {
        "outputs": vectors.outputs,
        "chunks": chunks,
        "batches": batches,
        "matrix_row": matrix.along,
        "vector_row": vector.along,
    }
    operands = (("matrix", matrix), ("vector", vector))
    functions = [codes.text, *(offset_function(name, found.batch, part.batch) for name, part in operands)]
    launch = EarlyLaunch(
        MATVEC,
        grid=(blocks, 1, 1),
        values=values,
        macros=macros,
        inputs={"matrix": matrix.argument, **bound.inputs},
        flops=found.flops,
        text="\n".join(functions),
        prologues={**bound.prologues, **codes.prologues},
        hurries=hurries,
    )
    return around.launch(launch, store)


def _shape(vectors: _Vectors, found: Product, outputs: int, device: DeviceModel) -> _Shape:
    work = _Work(
        load=_load(vectors.matrix, vectors.vector, found.k),
        k=found.k,
        outputs=outputs,
        chunks=ceil_div(vectors.outputs, outputs) * found.batches,
        blocks_each=_blocks_each(vectors, found, device),
    )
    return best_candidates(_candidates(work, device), THE_BEST)[0].sizes


def _candidates(work: _Work, device: DeviceModel) -> Iterator[Candidate[_Shape]]:
    """Rows shared by one warp or several: as long as the loads of one thread take, at the pace of the memory."""
    costs, lanes = _Costs.of(device), 32
    while lanes > 1 and lanes * work.load >= 2 * work.k:
        lanes //= 2
    chunks_each = ceil_div(work.chunks, device.cores * work.blocks_each)
    loaded_bytes = device.cores * work.blocks_each * 32 * _WARPS * _LOAD_BYTES  # by one load of all threads
    for warps_k in (1, 2, 4, 8) if lanes == 32 else (1,):
        passes = ceil_div(work.k, lanes * warps_k * work.load)
        rounds = ceil_div(passes * work.outputs, costs.in_flight)
        shape = _Shape(work.load, lanes, warps_k, work.outputs, ceil_div(passes, rounds))
        loads = passes * work.outputs + (costs.share_cost if warps_k > 1 else 0)
        clocks = ceil_div(chunks_each, shape.groups) * loads * (loaded_bytes / device.memory_a_clock)
        yield Candidate(costs.family, shape, device.microseconds(clocks))


def _blocks_each(vectors: _Vectors, found: Product, device: DeviceModel) -> int:
    """Blocks of a multiprocessor: one, if all it reads is on its way at once, so that the next kernel finds room."""
    nbytes, costs = found.batches * vectors.outputs * found.k * vectors.matrix.dtype.size, _Costs.of(device)
    return 1 if nbytes <= device.cores * costs.held_bytes else costs.blocks


def _load(matrix: Matrix, vector: Matrix, k: int) -> int:
    """Elements that a lane loads at a time from both operands, as far as they are in memory."""
    operands = [matrix] if isinstance(vector.operand, Computed) else [matrix, vector]
    loaded = [matrix] if isinstance(matrix.operand, Dequantised) else operands
    size = _LOAD_BYTES // max(operand.dtype.size for operand in loaded)
    numbers: Sequence[int] = (k, *(n for m in operands for n in m.across(along_k=True)))
    while size > 1 and any(number % size for number in numbers):
        size //= 2
    return size
