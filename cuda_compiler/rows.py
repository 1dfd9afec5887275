"""Lowers groups that reduce over their last dimension: a row stays in registers where it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from cuda_compiler.columns import lower_columns, rows_side_by_side
from cuda_compiler.dialect import CUDA, PACK_OF_FLOAT8
from cuda_compiler.maps import lower_elementwise, map_macros
from cuda_compiler.packing import PackedLoad, asking, each_element, pack_size, packed_loads, with_packs
from cuda_compiler.skeleton import KERNELS
from cuda_compiler.states import ROWS, identity, numbers, reduction_of, state_functions, state_type, value_of
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT8_E4M3FN, FLOAT16
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.anchors import Epilogue, pointer_macros, pointer_parameters
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import RowPhase, RowProgram, flops_of, row_operands, row_program
from npu_compiler.lowering.operands import Operands
from npu_compiler.lowering.positions import AXES, Positions, inner_axes, unpack
from npu_compiler.lowering.problems.forms import Computed
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch, Prologue
from npu_compiler.records import changed
from npu_compiler.tensor.coded import encoded_number, size_of
from npu_compiler.tensor.expr import Call, Expr, has_reduce, reductions

__all__ = ["ROW_KERNEL", "SCALED_ROWS", "ask_ahead", "lower_map", "lower_rows", "vector_operands", "vector_prologue"]

ROW_KERNEL = KernelTemplate(
    "rows",
    params="int rows",
    macros="ROW_THREADS BLOCK_THREADS",
    threads=lambda macros: macros["BLOCK_THREADS"],
    before="row_reductions.cuh",
)
SCALED_ROWS = KernelTemplate(
    "scaled_rows",
    params=ROW_KERNEL.params,
    macros=f"{ROW_KERNEL.macros} BESIDE_T",
    inputs="beside",
    threads=ROW_KERNEL.threads,
    before=ROW_KERNEL.before,
)

_MAX_THREADS = 512
_MAX_ITEMS = 8  # packs of a row that a thread keeps in registers
_MANY_ROWS = 512
_WARPS_A_BLOCK = 4
_ASKED = 32  # elements: at most a line of memory
_PREFIX = "v"  # of the names of what a vector is computed from, beside what follows a product of it


@dataclass(frozen=True)
class _Shape:
    """How threads share the work.

    Attributes:
        threads: Threads of a row.
        size: Elements of a pack.
        items: Packs of a row that each thread keeps; 0 where rows are read again for each reduction.
    """

    threads: int
    size: int
    items: int

    @property
    def rows_per_block(self) -> int:
        return _WARPS_A_BLOCK if self.threads == 32 else 1

    @property
    def block(self) -> int:
        return self.threads * self.rows_per_block


def lower_map(group: Group, lowering: Lowering) -> list[KernelCall]:
    """The launches of a group without a problem."""
    return lower_rows(group, lowering) if has_reduce(group.expr) else lower_elementwise(group, lowering)


def lower_rows(group: Group, lowering: Lowering) -> list[KernelCall]:
    """A warp or a block a row, or several rows a thread where neighbouring rows, not columns, lie side by side."""
    operands = row_operands(group, lowering.tensors, (*AXES[1:], "c"))
    if rows_side_by_side(group, operands):
        return [call for part in group.apart() for call in lower_columns(part, lowering)]
    rows = prod(operands.sizes[:-1])
    shape = _shape(group, operands, rows)
    loads = packed_loads(operands, [group.expr], shape.size)
    packed = with_packs(operands, loads, suffix="[j]" if shape.items else "")
    found = Positions(packed, _unpacked_row(operands), {"rows": rows}, "c")
    fused = Epilogue(group, found, _compute_row(group, found, loads, shape), map_macros(group, operands))
    macros: dict[str, object] = {"ROW_THREADS": shape.threads, "BLOCK_THREADS": shape.block}
    inputs = {}
    if group.beside is not None:
        stored, _ = group.beside
        macros["BESIDE_T"] = CUDA.storage[stored.dtype.name]
        inputs["beside"] = Argument(stored.index, writes=True)
    launch = Launch(
        ROW_KERNEL if group.beside is None else SCALED_ROWS,
        grid=(ceil_div(rows, shape.rows_per_block), 1, 1),
        values={"rows": rows},
        macros=macros,
        inputs=inputs,
    )
    return [KERNELS.launch(launch, fused, lowering)]


def vector_prologue(operand: Computed, lowering: Lowering, threads: int, blocks: int) -> Prologue:
    """A device function ``compute_row`` by which each block of threads computes an operand, one row or a few.

    One row is shared by all threads of a block, ``ROW_THREADS``; of several each is a warp's.

    Args:
        operand: The operand.
        lowering: Where the trace's tensors are.
        threads: Threads of a block.
        blocks: Blocks that do it.
    """
    group = operand.row
    rows = prod(group.shape[:-1])
    row_threads = threads if rows == 1 else 32
    operands, statements = vector_operands(group, lowering)
    shape = _block_shape(group, operands, row_threads)
    loads = packed_loads(operands, [group.expr], shape.size)
    packed = with_packs(operands, loads, suffix="[j]" if shape.items else "")
    compute = _compute_row(group, Positions(packed, statements, {}, "c"), loads, shape)
    text = "\n".join((compute, *ask_ahead(loads, operands, lowering, group.shape[-1])))
    return Prologue(
        (operands,),
        macros={"ROW_THREADS": row_threads, **pointer_macros("VECTOR", operands, CUDA)},
        text=text,
        files=(ROW_KERNEL.before,),
        flops=blocks * rows * flops_of([operand.expr], group.shape[-1]),
    )


def vector_operands(group: Group, lowering: Lowering) -> tuple[Operands, tuple[str, ...]]:
    """What a product's kernel computes its vectors from, in column ``c``; and how ``row`` becomes a position first."""
    one = prod(group.shape[:-1]) == 1
    positions = ("0" for _ in group.shape[:-1]) if one else AXES[1:]
    operands = row_operands(group, lowering.tensors, (*positions, "c"), _PREFIX)
    return operands, () if one else _unpacked_row(operands)


def ask_ahead(loads: Sequence[PackedLoad], operands: Operands, lowering: Lowering, width: int) -> list[str]:
    """A device function ``ask_ahead``, by which a block has on its way to the level-2 cache what its rows are made of.

    Of that, what all rows of `width` elements have in common, as a norm's weights, and no kernel of the plan writes.
    """
    kept = [load for load in loads if lowering.tensors[load.leaf.ref.tensor].source is None]
    of_rows = [load for load in kept if not any(operands.walks[load.leaf][:-1])]
    lines = [f"        {line}" for line in asking(of_rows)]
    loop = f"for (int c = int(threadIdx.x) * {_ASKED}; c < {width}; c += threads * {_ASKED}) {{"
    return [
        f"{CUDA.inline} void ask_ahead(int threads, {pointer_parameters(operands, CUDA)}const Params& p)",
        "{",
        *([f"    {loop}", *lines, "    }"] if lines else []),
        "}",
    ]


def _unpacked_row(operands: Operands) -> tuple[str, ...]:
    """Statements by which the number of a row becomes its position."""
    sizes = operands.sizes[:-1]
    return tuple(unpack("row", inner_axes(len(sizes)), sizes))


def _shape(group: Group, operands: Operands, rows: int) -> _Shape:
    longest = max(*(reduce.extent for reduce in reductions(group.expr)), group.shape[-1], 1)
    packs = ceil_div(longest, _row_pack(group, operands))
    kept = 1 if rows < _MANY_ROWS else 4
    return _block_shape(group, operands, min(_MAX_THREADS, 32 * ceil_div(packs, 32 * kept)))


def _block_shape(group: Group, operands: Operands, threads: int) -> _Shape:
    """How so many threads share a row."""
    size = _row_pack(group, operands)
    items = ceil_div(group.shape[-1], size * threads)
    return _Shape(threads, size, items if _is_whole_row(group) and items <= _MAX_ITEMS else 0)


def _row_pack(group: Group, operands: Operands) -> int:
    return pack_size(group, operands, group.shape[-1]) if _is_whole_row(group) and group.index is None else 1


def _is_whole_row(group: Group) -> bool:
    """Whether everything that is reduced is as long as the result."""
    return {reduce.extent for reduce in reductions(group.expr)} == {group.shape[-1]}


def _compute_row(group: Group, found: Positions, loads: Sequence[PackedLoad], shape: _Shape) -> str:
    """The device function ``compute_row``."""
    storage = CUDA.storage[group.output.dtype.name]
    rounded = encoded_number(group.expr, FLOAT8_E4M3FN) if shape.size % 4 == 0 else None
    program = row_program(group if rounded is None else changed(group, expr=rounded), found.operands, CUDA)
    packs = [f"        const {_pack(load, shape)} {_load(load, number)};" for number, load in enumerate(loads)]
    inside = [] if shape.items else packs
    lines = [
        *state_functions(program.phases, ROWS),
        f"{CUDA.inline} void compute_row(int row, int lane, {_beside_parameter(group)}{storage}* out, "
        f"{pointer_parameters(found.operands, CUDA)}const Params& p)",
        "{",
        *found.statements,
        *([program.head] if program.head else []),
        *(_keep(loads, shape, program.width) if shape.items else []),
    ]
    pairs = _pairs_of_sizes(group, loads, shape)
    for number, phase in enumerate(program.phases):
        lines += _sizes(phase, *pairs[number], shape) if number in pairs else _phase(phase, number, shape, inside)
    lines += [*program.tail, *_store_beside(program)]
    packed = shape.size > 1 and program.width == program.phases[0].extent
    if packed:
        lines += _packed_results(found, program, inside, shape, storage, rounded=rounded is not None)
    else:
        lines += _results(program, shape, storage)
    lines.append("}")
    return "\n".join(lines)


def _beside_parameter(group: Group) -> str:
    return "" if group.beside is None else f"{CUDA.storage[group.beside[0].dtype.name]}* beside, "


def _store_beside(program: RowProgram) -> list[str]:
    """The statement by which one thread stores what belongs to the whole row."""
    if not program.beside:
        return []
    return ["    if (lane == 0) {", *program.beside_body, f"        beside[row] = {program.beside};", "    }"]


def _results(program: RowProgram, shape: _Shape, storage: str) -> list[str]:
    """The loop that computes and stores one result at a time."""
    return [
        *_loop(program.width, shape, 1),
        *([program.body] if program.body else []),
        f"        {program.place.condition}out[{program.place.address}] = {storage}({program.value});",
        "    }",
    ]


def _packed_results(
    found: Positions, program: RowProgram, inside: Sequence[str], shape: _Shape, storage: str, *, rounded: bool
) -> list[str]:
    """The loop that computes and stores packs of results, `rounded` to codes of 8-bit floats or as they are."""
    return [
        *_loop(program.width, shape, shape.size),
        *inside,
        f"        float result[{shape.size}];" if rounded else f"        Pack<{storage}, {shape.size}> result;",
        f"        {storage}* target = out + {found.operands.output};",
        *each_element("c", shape.size, " " * 8),
        *([program.body] if program.body else []),
        f"            result[u] = {program.value if rounded else f'{storage}({program.value})'};",
        "        }",
        f"        store_pack(target, {f'{PACK_OF_FLOAT8}(result)' if rounded else 'result'});",
        "    }",
    ]


def _pack(load: PackedLoad, shape: _Shape) -> str:
    return f"Pack<{load.storage}, {shape.size}>"


def _load(load: PackedLoad, number: int) -> str:
    return f"x{number} = {load.source}"


def _keep(loads: Sequence[PackedLoad], shape: _Shape, extent: int) -> list[str]:
    """Loads of the whole row into registers."""
    lines = [f"    {_pack(load, shape)} x{number}[{shape.items}];" for number, load in enumerate(loads)]
    if not loads:
        return lines
    stores = [f"        x{number}[j] = {load.source};" for number, load in enumerate(loads)]
    return [*lines, *_loop(extent, shape, shape.size), *stores, "    }"]


def _loop(extent: int, shape: _Shape, size: int) -> list[str]:
    """The head of a loop over a thread's packs of the row; ``c`` is the column of the first element."""
    step = shape.threads * size
    if not shape.items:
        return [f"    for (int c = lane * {size}; c < {extent}; c += {step}) {{"]
    return [
        "    #pragma unroll",
        f"    for (int j = 0; j < {shape.items}; ++j) {{",
        f"        int c = lane * {size} + j * {step};",
        f"        if (c >= {extent}) {{ continue; }}",
    ]


def _pairs_of_sizes(group: Group, loads: Sequence[PackedLoad], shape: _Shape) -> dict[int, tuple[str, str]]:
    """Phases that find the largest size of numbers of 16 bits, two at a time: the packs of these, and their type."""
    if shape.size == 1 or not shape.items:
        return {}
    packs: dict[Expr, tuple[str, str]] = {
        load.leaf: (f"x{number}[j]", load.storage) for number, load in enumerate(loads)
    }
    rows = dict.fromkeys(reduce.row for reduce in reductions(group.expr))
    numbers = {at: size_of(args[0]) for at, (how, args, _) in enumerate(rows) if how.function == "max"}
    leaves = {at: _uncast(number) for at, number in numbers.items() if number is not None}
    return {at: packs[leaf] for at, leaf in leaves.items() if leaf in packs and leaf.dtype in (FLOAT16, BFLOAT16)}


def _uncast(number: Expr) -> Expr:
    """What a float32 was made of."""
    return number.args[0] if isinstance(number, Call) and number.fn == "cast" else number


def _sizes(phase: RowPhase, pack: str, storage: str, shape: _Shape) -> list[str]:
    """The reduction of such a phase."""
    return [
        *phase.head,
        f"    uint pairs_{phase.name} = 0;",
        *_loop(phase.extent, shape, shape.size),
        f"        pairs_{phase.name} = greater_sizes(pairs_{phase.name}, {pack});",
        "    }",
        f"    int {phase.name} = row_max(size_of_pair<{storage}>(pairs_{phase.name}));",
    ]


def _phase(phase: RowPhase, number: int, shape: _Shape, inside: Sequence[str]) -> list[str]:
    """A reduction over the row, whose result every thread ends up with."""
    part, name, kind = f"part{number}", reduction_of(phase), state_type(phase)
    return [
        *phase.head,
        f"    {kind} {part} = {identity(phase)};",
        *_loop(phase.extent, shape, shape.size),
        *inside,
        *each_element("c", shape.size, " " * 8),
        *([phase.body] if phase.body else []),
        f"            {part} = combine_{name}({part}, {value_of(phase)});",
        "        }",
        "    }",
        f"    {kind} {phase.name} = row_{name}({part});",
        *(f"    {number}" for number in numbers(phase, phase.name)),
    ]
