"""Lowers rows that are combined where an index says: a block looks through the index for what its rows take.

A long index is sorted first, in slabs, in which blocks find theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import define_indexed, each_element, pack_source, packed_loads, with_packs
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.integers import ceil_div, power_of_two
from npu_compiler.lowering.anchors import function, pointer_macros, pointer_parameters
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.dialect import Printer
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import flops_of
from npu_compiler.lowering.operands import Operands, merge_groups
from npu_compiler.lowering.problems.forms import Computed
from npu_compiler.lowering.problems.operand import Operand, are_chunks
from npu_compiler.lowering.problems.scatter import ScatterRows
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch, Prologue
from npu_compiler.tensor.expr import Load
from npu_compiler.tensor.view import View

__all__ = ["SCATTER_ROWS", "SCATTER_SORT", "SCATTER_SORTED", "loads_values", "lower_scatter_rows"]

_POSITIONS = ("outer", "entry", "column")

_THREADS = 256
_CHUNK = 8192  # indices that a block looks through at a time
_LOOKED_THROUGH = 2048  # indices beyond which it is worth it to sort them first
_SLAB, _MOST_SLAB, _SLABS = 1024, 8192, 256  # indices sorted together, and slabs that a block reads at a time
_INDEX_BYTES = 4
_SORT_ITEMS = 8  # indices of a thread that sorts them
_ENTRIES, _PLACES = 1 << 32, 1 << 24  # numbers of rows by those of a slab, and places, that kernels tell apart
_FEW = 8192  # rows of which each block may compute where they go
_MOST_SUMS = 32  # numbers that a thread holds
_COMBINE = {"sum": "combine_sum", "mean": "combine_sum", "prod": "combine_prod", "amax": "combine_max"}
_COMBINE |= {"amin": "combine_min"}

_INDEX_MACROS = "INDEX_PARAMETERS INDEX_ARGUMENTS"
_RESULT_MACROS = "b_t VALUE_T VALUES_PARAMETERS VALUES_ARGUMENTS LANES COMBINE NEUTRAL MEAN INCLUDED HAS_BASE FILL"
_RESULT_PARAMS = "int rows, width, base_outer, base_row, base_column, row_blocks, column_blocks"
SCATTER_ROWS = KernelTemplate(
    "scatter_rows",
    params=f"{_RESULT_PARAMS}, count",
    macros=f"{_INDEX_MACROS} INDEX_PACK INDEX_POINTER? {_RESULT_MACROS} EACH CHUNK",
    inputs="index? values? base?",
    threads=_THREADS,
    computed="index values",
    files="scatter_result.cuh",
)
SCATTER_SORT = KernelTemplate(
    "scatter_sort",
    params="int rows, count, row_blocks, block_rows",
    macros=f"{_INDEX_MACROS} WIDE PACKED THREADS ITEMS RUN",
    inputs="index?",
    outputs="sorted starts",
    threads=lambda macros: macros["THREADS"],
    computed="index",
    files="scatter_entries.cuh sort_network.cuh sort_registers.cuh",
)
SCATTER_SORTED = KernelTemplate(
    "scatter_sorted",
    params=f"{_RESULT_PARAMS}, slabs",
    macros=f"{_RESULT_MACROS} SLAB",
    inputs="sorted starts values? base?",
    threads=_THREADS,
    computed="values",
    files="scatter_result.cuh",
)


@lowering_of(ScatterRows)
def lower_scatter_rows(scatter: ScatterRows, group: Group, lowering: Lowering) -> list[KernelCall]:
    """A block computes some rows of a range of columns; it combines their values in order, so always alike.

    Raises:
        OpRefusal: A tensor that the epilogue reads is too large.
    """
    around = AnchoredGroup.of(group, lowering)
    size = _pack_size(scatter, around)
    outer, rows, width = scatter.shape
    packs = ceil_div(width, size)
    lanes = min(_THREADS, power_of_two(packs))
    slab = _slab(scatter, _THREADS // lanes)
    each = 1 if slab else _each(scatter, size, lanes, lowering.device)
    row_blocks, column_blocks = ceil_div(rows, _THREADS // lanes * each), ceil_div(packs, lanes)
    blocks = {"row_blocks": row_blocks, "column_blocks": column_blocks}
    base = scatter.base
    prologues = {"values": _values(scatter, size, lowering)}
    inputs = {} if base is None else {"base": base.argument}
    macros = {
        "b_t": CUDA.storage[(base or scatter.result).dtype.name],
        "LANES": lanes,
        "COMBINE": _COMBINE[scatter.how],
        **scatter.macros(CUDA),
    }
    calls = []
    if slab:
        template, sizes = SCATTER_SORTED, {**scatter.sizes, **blocks, "slabs": ceil_div(scatter.count, slab)}
        macros["SLAB"] = slab
        call, sorted_index = _sort_index(scatter, slab, row_blocks, _THREADS // lanes, lowering)
        calls.append(call)
        inputs |= sorted_index
    else:
        template, sizes = SCATTER_ROWS, {**scatter.sizes, **blocks}
        macros |= {"EACH": each, "CHUNK": _CHUNK}
        prologues = {"index": _index(scatter, lowering, by_packs=True), **prologues}
    launch = Launch(
        template,
        grid=(row_blocks * column_blocks * outer, 1, 1),
        values=template.values_among(sizes),
        macros=macros,
        inputs=inputs,
        flops=scatter.flops,
        prologues=prologues,
    )
    return [*calls, around.launch(launch, size)]


def _slab(scatter: ScatterRows, block_rows: int) -> int:
    """How many indices are sorted together; 0 where each block looks through the index as it is."""
    _, rows, _ = scatter.shape
    slab = _SLAB
    while ceil_div(scatter.count, slab) > _SLABS and slab < _MOST_SLAB and 2 * slab * rows < _ENTRIES:
        slab *= 2
    is_worth_it = scatter.count > _LOOKED_THROUGH and rows > block_rows
    return slab if is_worth_it and scatter.count <= _PLACES and slab * rows < _ENTRIES else 0


def _sort_index(
    scatter: ScatterRows, slab: int, row_blocks: int, block_rows: int, lowering: Lowering
) -> tuple[KernelCall, dict[str, Argument]]:
    """The launch that sorts the index, and what it makes for the next one."""
    slabs, threads = ceil_div(scatter.count, slab), slab // _SORT_ITEMS
    nbytes = slabs * slab * _INDEX_BYTES, (row_blocks + 1) * slabs * _INDEX_BYTES
    made = {name: lowering.scratch(size) for name, size in zip(("sorted", "starts"), nbytes, strict=True)}
    _, rows, _ = scatter.shape
    launch = Launch(
        SCATTER_SORT,
        grid=(slabs, 1, 1),
        values={"rows": rows, "count": scatter.count, "row_blocks": row_blocks, "block_rows": block_rows},
        macros={"WIDE": 0, "PACKED": 1, "THREADS": threads, "ITEMS": _SORT_ITEMS, "RUN": slab},
        outputs={name: Argument(buffer, writes=True) for name, buffer in made.items()},
        flops=scatter.count * slab.bit_length(),
        prologues={"index": _index(scatter, lowering, by_packs=False)},
    )
    call = KERNELS.launch_alone(launch, f"order of {scatter.result.name}", sum(nbytes), lowering)
    return call, {name: Argument(buffer) for name, buffer in made.items()}


def _each(scatter: ScatterRows, size: int, lanes: int, device: DeviceModel) -> int:
    """Rows of a thread: as many as leave work for all multiprocessors, so that few blocks look through the index.

    Where that is long, a block a multiprocessor is enough.
    """
    outer, rows, width = scatter.shape
    blocks = outer * rows * ceil_div(width, size * lanes) * lanes // _THREADS
    each, enough = 1, device.cores * (2 if scatter.count <= _CHUNK else 1)
    while 2 * each * size <= _MOST_SUMS and lanes > 1 and blocks // (2 * each) >= enough:
        each *= 2
    return each


def loads_values(group: Group, position: int, operand: Operand) -> bool:
    """Whether the kernel computes an operand itself: values, each of which it reads once, or an index of few rows."""
    if not isinstance(group.problem, ScatterRows) or not isinstance(operand, Computed) or operand.is_of_rows:
        return False
    return position == 1 or (position == 0 and group.problem.count <= _FEW)


def _operands(operand: Operand, lowering: Lowering, positions: Sequence[str], prefix: str) -> Operands:
    """What an element of an operand reads."""
    each = merge_groups([(dim,) for dim in range(len(operand.shape))])
    nowhere = View(operand.shape, (0,) * len(operand.shape))
    return Operands.resolve([operand.element], nowhere, lowering.tensors, positions, each, prefix=prefix)


def _index(scatter: ScatterRows, lowering: Lowering, by_packs: bool) -> Prologue:
    """The device function ``row_at``, which gives the row that a row of values is for.

    Args:
        scatter: What is combined.
        lowering: Where the trace's tensors are.
        by_packs: Whether the kernel reads several indices at once where they lie side by side.
    """
    index = scatter.index
    operands = _operands(index, lowering, ("entry",), "g")
    printer = Printer(CUDA, operands.names)
    head = f"{CUDA.inline} int row_at(int entry, {pointer_parameters(operands, CUDA)}const Params& p)"
    value = printer.value(index.element)
    packed = not isinstance(index, Computed) and are_chunks(4, index.strides[0], (index.offset,))
    macros = pointer_macros("INDEX", operands, CUDA)
    if by_packs:
        macros |= {"INDEX_PACK": 4, "INDEX_POINTER": "ge0"} if packed else {"INDEX_PACK": 1}
    return Prologue((operands,), macros=macros, text=function(head, printer.lines, value))


def _values(scatter: ScatterRows, size: int, lowering: Lowering) -> Prologue:
    """The device function ``values_at``, which gives `size` neighbouring columns of a row of values."""
    operands = _operands(scatter.values, lowering, _POSITIONS, "f")
    expr, kind = scatter.values.element, f"Pack<float, {size}>"
    packs = {f"x{n}": load for n, load in enumerate(packed_loads(operands, [expr], size, indexed=True, checked=True))}
    places = Printer(CUDA, operands.names, variable="at")
    printer = Printer(CUDA, with_packs(operands, [*packs.values()]).names, "        ")
    define_indexed(printer, packs)
    value = printer.value(expr)
    heads = [f"    Pack<{load.storage}, {size}> {x} = {pack_source(load, places)};" for x, load in packs.items()]
    positions = "int outer, int entry, int column, "
    head = f"{CUDA.inline} {kind} values_at({positions}{pointer_parameters(operands, CUDA)}const Params& p)"
    body = [
        *places.lines,
        *heads,
        f"    {kind} result;",
        *each_element("column", size, " " * 4),
        *printer.lines,
        f"        result[u] = {value};",
        "    }",
    ]
    macros = {"VALUE_T": "float", **pointer_macros("VALUES", operands, CUDA)}
    flops = flops_of([expr], prod(scatter.values.shape))
    return Prologue((operands,), macros=macros, text=function(head, body, "result"), flops=flops)


def _pack_size(scatter: ScatterRows, around: AnchoredGroup) -> int:
    """Columns of a thread: those that the epilogue stores together, where values and base can be read that way too."""
    size, base = around.pack_size(), scatter.base
    while size > 1 and prod(scatter.shape) < size * _THREADS * around.device.cores:
        size //= 2  # more blocks, each of fewer rows
    operands = _operands(scatter.values, around.lowering, _POSITIONS, "f")
    side_by_side = sum(walk_of[-1] == 1 for leaf, walk_of in operands.walks.items() if isinstance(leaf, Load))
    while size > 1:
        reads_base = base is None or are_chunks(size, base.strides[2], base.across(2))
        found_packs = packed_loads(operands, [scatter.values.element], size, indexed=True, checked=True)
        if reads_base and len(found_packs) >= side_by_side:
            break
        size //= 2
    return size
