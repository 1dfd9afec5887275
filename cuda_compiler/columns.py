"""Lowers groups that reduce along rows which lie side by side, as the channels of an image: a thread takes several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cuda_compiler.devices import busy_threads
from cuda_compiler.dialect import CUDA
from cuda_compiler.maps import map_macros
from cuda_compiler.packing import PackedLoad, each_element, pack_positions, pack_size, packed_loads, with_packs
from cuda_compiler.skeleton import KERNELS
from cuda_compiler.states import (
    COLUMNS,
    identity,
    numbers,
    reduction_of,
    state_bytes,
    state_functions,
    state_type,
    value_of,
)
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.anchors import Epilogue, pointer_parameters
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import RowPhase, RowProgram, row_operands, row_program
from npu_compiler.lowering.operands import Operands
from npu_compiler.lowering.positions import AXES, Positions
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch
from npu_compiler.tensor.expr import leaves, reductions, walk

__all__ = ["lower_columns", "rows_side_by_side"]

COLUMN_KERNEL = KernelTemplate(
    "columns",
    params="int packs",
    macros="LANES SLICES",
    threads=lambda macros: macros["LANES"] * macros["SLICES"],
    before="column_reductions.cuh",
)
_MAX_LANES = 32  # packs of a block
_USUAL_THREADS, _MAX_THREADS = 256, 512  # of a block; more than usual where there is nothing else to share
_SECTOR_BYTES = 64  # read side by side: fewer lanes than that many bytes take would read others' memory along
_STATIC_BYTES = 48 << 10  # of shared memory that CUDA lets any kernel declare
_UNROLLED = 8  # loads that a thread has on their way
_ROWS = -2  # the last of the rows' dimensions, along which they lie side by side


def rows_side_by_side(group: Group, operands: Operands) -> bool:
    """Whether what is reduced is contiguous along the last of the rows' dimensions, not along the row itself."""
    found = reductions(group.expr)
    single = all(reduce.extent == 1 for reduce in found)  # all rows of one column lie so, and nothing moves along them
    walks = [operands.walks[load] for reduce in found for arg in reduce.args for load in leaves(arg)]
    moving = [walk for walk in walks if single or walk[-1]]
    return bool(moving) and all(walk[_ROWS] == 1 and walk[-1] != 1 for walk in moving)


def lower_columns(group: Group, lowering: Lowering) -> list[KernelCall]:
    """A thread takes a pack of neighbouring rows; several share the columns of these where rows are few."""
    operands = _without_single_columns(group, row_operands(group, lowering.tensors, (*AXES[1:], "c")))
    size = 1 if group.index is not None else pack_size(group, operands, operands.sizes[_ROWS], _ROWS)
    loads = packed_loads(operands, [group.expr], size, _ROWS)
    found = pack_positions("pack", with_packs(operands, loads), operands.sizes[:-1], size)
    program, packs = row_program(group, found.operands, CUDA, hoisting=False), found.extents["packs"]
    columns = max(phase.extent for phase in program.phases)
    least = ceil_div(_SECTOR_BYTES, size * max((load.dtype.size for load in leaves(group.expr)), default=1))
    lanes, slices = _division(packs, columns, size * state_bytes(program.phases), least, lowering.device)
    fused = Epilogue(group, found, _compute_rows(group, found, program, loads, size), map_macros(group, operands))
    macros = {"LANES": lanes, "SLICES": slices}
    launch = Launch(COLUMN_KERNEL, (ceil_div(packs, lanes), 1, 1), found.extents, macros)
    return [KERNELS.launch(launch, fused, lowering)]


def _without_single_columns(group: Group, operands: Operands) -> Operands:
    """Operands whose stride along a row of one element is none: it never counts."""
    if group.shape[-1] != 1:
        return operands
    reduced = {node for reduce in reductions(group.expr) for arg in reduce.args for node in walk(arg)}
    walks = {key: steps if key in reduced else (*steps[:-1], 0) for key, steps in operands.walks.items()}
    return replace(operands, walks=walks)


def _division(packs: int, columns: int, nbytes: int, least: int, device: DeviceModel) -> tuple[int, int]:
    """Packs of a block, and threads that share the columns of each: as few threads as keep the device busy.

    Args:
        packs: Packs of rows.
        columns: What is reduced.
        nbytes: Size of the states of a pack, which all threads of a block have in shared memory.
        least: Packs of a block that read whole sectors of memory.
        device: What they run on.
    """
    busy = busy_threads(device, "columns")
    lanes, slices = _MAX_LANES, 1
    while lanes > least and lanes >= 2 * packs:
        lanes //= 2
    while packs * slices < busy and slices * 4 <= columns:
        if 2 * lanes * slices <= _USUAL_THREADS and 2 * lanes * slices * nbytes <= _STATIC_BYTES:
            slices *= 2
        elif lanes > least and packs < device.cores * lanes:
            lanes //= 2
        elif 2 * lanes * slices <= _MAX_THREADS and 2 * lanes * slices * nbytes <= _STATIC_BYTES:
            slices *= 2
        else:
            break
    return lanes, slices


def _compute_rows(group: Group, found: Positions, program: RowProgram, loads: Sequence[PackedLoad], size: int) -> str:
    """The device function ``compute_rows``."""
    storage = CUDA.storage[group.output.dtype.name]
    packs = [f"        const Pack<{load.storage}, {size}> x{i} = {load.source};" for i, load in enumerate(loads)]
    lines = [
        *state_functions(program.phases, COLUMNS),
        f"{CUDA.inline} void compute_rows(int pack, int slice, bool alive, {storage}* out, "
        f"{pointer_parameters(found.operands, CUDA)}const Params& p)",
        "{",
        *found.statements,
    ]
    for number, phase in enumerate(program.phases):
        lines += _phase(phase, program.phases[:number], found.inner, packs, size)
    lines += [f"    for (int c = slice; c < {program.width}; c += SLICES) {{", *packs]
    return "\n".join([*lines, *_results(found, program, storage, size), "    }", "}"])


def _results(found: Positions, program: RowProgram, storage: str, size: int) -> list[str]:
    """Statements that compute and store one column of a pack of rows."""
    head = _each_row(program.phases, found.inner, size)
    value = f"{storage}({program.value})"
    if size == 1:
        statement = f"{program.place.condition}out[{program.place.address}] = {value};"
        store = ["            if (alive) {", f"                {statement}", "            }"]
        return [*head, *([program.body] if program.body else []), *store, "        }"]
    return [
        f"        Pack<{storage}, {size}> result;",
        f"        {storage}* target = out + {found.operands.output};",
        *head,
        *([program.body] if program.body else []),
        f"            result[u] = {value};",
        "        }",
        "        if (alive) {",
        "            store_pack(target, result);",
        "        }",
    ]


def _phase(phase: RowPhase, earlier: Sequence[RowPhase], inner: str, packs: Sequence[str], size: int) -> list[str]:
    """A reduction along the rows of a pack."""
    part, name = f"{phase.name}s", reduction_of(phase)
    return [
        f"    {state_type(phase)} {part}[{size}];",
        "    #pragma unroll",
        f"    for (int u = 0; u < {size}; ++u) {{",
        f"        {part}[u] = {identity(phase)};",
        "    }",
        f"    #pragma unroll {_UNROLLED}",
        f"    for (int c = slice; c < {phase.extent}; c += SLICES) {{",
        *packs,
        *_each_row(earlier, inner, size),
        *([phase.body] if phase.body else []),
        f"            {part}[u] = combine_{name}({part}[u], {value_of(phase)});",
        "        }",
        "    }",
        f"    columns_{name}({part});",
    ]


def _each_row(finished: Sequence[RowPhase], inner: str, size: int) -> list[str]:
    """The head of a loop over the rows of a pack; results of earlier reductions are at hand under their names."""
    return [
        *each_element(inner, size, " " * 8),
        *(f"            {statement}" for phase in finished for statement in _finished(phase)),
    ]


def _finished(phase: RowPhase) -> list[str]:
    """The result of a reduction for the row at hand, under its name."""
    own = f"const {state_type(phase)} {phase.name} = {phase.name}s[u];"
    return [own, *numbers(phase, phase.name)]
