"""Lowers attention: one launch, or two where a long cache is shared out among threadgroups."""

from __future__ import annotations

from dataclasses import dataclass

from npu_compiler.codegen.dialect import Dialect
from npu_compiler.codegen.grouping import Group
from npu_compiler.codegen.loops import traffic_of
from npu_compiler.codegen.metal.epilogue import Dims, anchor_kernel, anchor_of
from npu_compiler.codegen.metal.skeleton import assemble, kernel_file
from npu_compiler.codegen.metal.tiles import GROUP, MAX_GRID, TILE_THREADS, check_size, chunk_of
from npu_compiler.codegen.operands import TensorArg
from npu_compiler.codegen.params import ParamStruct
from npu_compiler.codegen.target import Launch, Lowering
from npu_compiler.dtypes import BOOL, FLOAT32, DType
from npu_compiler.symbolic import OpRefusal
from npu_compiler.trace import TracedTensor
from npu_compiler.view import View

__all__ = ["ATTENTION_FIELDS", "COMBINE_FIELDS", "lower_attention"]

ATTENTION_FIELDS = (
    *("rows", "length", "heads", "groups", "part", "all_rows"),
    *("q_batch", "q_head", "q_row", "q_step"),
    *("k_batch", "k_head", "k_row", "k_step"),
    *("v_batch", "v_head", "v_row", "v_step"),
    *("mask_batch", "mask_head", "mask_row"),
)
COMBINE_FIELDS = ("rows", "all_rows", "parts")

_MAX_HEAD_SIZE = 256
_FEW_ROWS = 16  # so many that threadgroup memory holds their scores for large blocks
_LONG = 4096  # positions from which on they are shared out
_MIN_PART = 512  # positions that are worth a threadgroup
_ENOUGH_THREADGROUPS = 64  # keep a large GPU busy
_DIMS: Dims = ((0, 1), (2,), (3,))
_MASK_NONE, _MASK_BOOLEAN, _MASK_ADDED = range(3)


@dataclass(frozen=True)
class _Operand:
    """A tensor [batch, heads, rows, size] as the kernel reads it."""

    tensor: TracedTensor
    view: View

    @property
    def argument(self) -> TensorArg:
        return TensorArg(self.tensor.index, self.view.offset * self.tensor.dtype.size)

    def strides(self, name: str) -> dict[str, int]:
        parts = ("batch", "head", "row", "step")
        return {f"{name}_{part}": stride for part, stride in zip(parts, self.view.strides, strict=True)}

    def is_matrices(self, tile: DType) -> bool:
        """Whether it can be loaded as 8x8 matrices of `tile`, and nothing but that."""
        _, _, rows, size = self.view.shape
        return self.tensor.dtype == tile and self.view.strides[3] == 1 and rows % 8 == 0 and size % 8 == 0

    def chunk(self, tile: DType) -> int:
        """Elements that the kernel copies at a time along a row."""
        *outer, step = self.view.strides
        return chunk_of(self.tensor.dtype, tile, step, (self.view.offset, *outer, self.view.shape[-1]))


@dataclass(frozen=True)
class _Attention:
    """What is to be computed, and how it is divided.

    Attributes:
        tile: Data type that operands are multiplied in.
        tile_rows, block: Query rows and positions of a step.
        direct: Whether keys and values are read as matrices where they lie.
        simdgroups: Simdgroups of a threadgroup.
        parts: Threadgroups that share the positions of a row.
    """

    q: _Operand
    k: _Operand
    v: _Operand
    mask: _Operand | None
    scale: float
    causal: bool
    tile: DType
    tile_rows: int
    block: int
    direct: bool
    simdgroups: int
    parts: int

    @property
    def shared(self) -> int:
        """Query heads that share a head of keys and values."""
        return self.q.view.shape[1] // self.k.view.shape[1]

    @property
    def length(self) -> int:
        return self.k.view.shape[2]

    @property
    def all_rows(self) -> int:
        batch, heads, rows, _ = self.q.view.shape
        return batch * heads * rows

    @property
    def part(self) -> int:
        """Positions of a part, whole blocks."""
        return -(-self.length // (self.parts * self.block)) * self.block

    @property
    def value_size(self) -> int:
        return self.v.view.shape[3]


def lower_attention(group: Group, lowering: Lowering, dialect: Dialect) -> list[Launch]:
    """``softmax(q @ k.T * scale + mask) @ v`` for each head, without storing the scores.

    Raises:
        OpRefusal: A head is larger than 256, or a tensor is too large.
    """
    found = _attention(group, lowering)
    if found.parts > 1:
        return _lower_parts(found, group, lowering, dialect)
    inputs = _inputs(found)
    kernel = anchor_kernel(
        *("attention", group, lowering, dialect, _DIMS, len(inputs), ATTENTION_FIELDS),
        {**_definitions(found, dialect), "PARTIAL": 0},
        ("store.metal", "tile.metal"),
    )
    return [kernel.launch(inputs, _values(found), _grid(found), 32 * found.simdgroups, _flops(found))]


def _attention(group: Group, lowering: Lowering) -> _Attention:
    anchor = anchor_of(group)
    operands = [_Operand(lowering.tensors[ref.tensor], ref.view) for ref in anchor.operands]
    for operand in operands:
        check_size(operand.tensor)
    q, k, v, *masks = operands
    size, value_size = q.view.shape[3], v.view.shape[3]
    if min(size, value_size, k.view.shape[2]) < 1 or max(size, value_size) > _MAX_HEAD_SIZE:
        given = f"heads of {size} and {value_size} over {k.view.shape[2]} positions"
        raise OpRefusal(f"given {given}, expected heads of 1 to {_MAX_HEAD_SIZE} and at least one position")
    dtypes = {operand.tensor.dtype for operand in (q, k, v)}
    tile = q.tensor.dtype if len(dtypes) == 1 else FLOAT32
    rows = q.view.shape[1] // k.view.shape[1] * q.view.shape[2]
    direct = rows <= _FEW_ROWS and value_size % 64 == 0 and k.is_matrices(tile) and v.is_matrices(tile)
    tile_rows, block = _tile(rows, max(size, value_size) * tile.size)
    simdgroups = TILE_THREADS // 32
    if direct:  # as many as there are matrices side by side in the result, and in the scores
        simdgroups = 16 if value_size % 128 == 0 else 8
        block = 8 * simdgroups
    threadgroups = q.view.shape[0] * k.view.shape[1] * -(-rows // tile_rows)
    return _Attention(
        *(q, k, v, masks[0] if masks else None, float(anchor.attrs["scale"]), bool(anchor.attrs["causal"])),
        *(tile, tile_rows, block, direct, simdgroups, _parts(k.view.shape[2], threadgroups)),
    )


def _tile(rows: int, row_bytes: int) -> tuple[int, int]:
    """Query rows and positions of a step that threadgroup memory holds, given the bytes of a head."""
    most, block = (32, 32) if row_bytes <= 256 else (16, 32) if row_bytes <= 512 else (8, 16)
    return min(most, -(-rows // 8) * 8), block


def _parts(length: int, threadgroups: int) -> int:
    """In how many parts the positions are computed: a few rows over a long cache leave a GPU idle otherwise."""
    if length < _LONG:
        return 1
    return max(1, min(length // _MIN_PART, _ENOUGH_THREADGROUPS // threadgroups))


def _inputs(found: _Attention) -> list[TensorArg]:
    masks = [] if found.mask is None else [found.mask]
    return [operand.argument for operand in (found.q, found.k, found.v, *masks)]


def _definitions(found: _Attention, dialect: Dialect) -> dict[str, object]:
    size, tile = found.q.view.shape[3], found.tile
    definitions: dict[str, object] = {
        "q_t": dialect.storage[found.q.tensor.dtype.name],
        "k_t": dialect.storage[found.k.tensor.dtype.name],
        "v_t": dialect.storage[found.v.tensor.dtype.name],
        "tile_t": dialect.storage[tile.name],
        "HEAD_SIZE": size,
        "VALUE_SIZE": found.value_size,
        "TILE_M": found.tile_rows,
        "TILE_N": -(-found.value_size // 32) * 32,
        "BLOCK": found.block,
        "SIMDGROUPS": found.simdgroups,
        "DIRECT": int(found.direct),
        "K_CHUNK": found.k.chunk(tile),
        "V_CHUNK": found.v.chunk(tile),
        "SCALE": dialect.literal(found.scale, FLOAT32),
        "CAUSAL": int(found.causal),
        "MASK": _MASK_NONE,
    }
    if found.mask is not None:
        kind = found.mask.tensor.dtype
        definitions["MASK"] = _MASK_BOOLEAN if kind == BOOL else _MASK_ADDED
        definitions["MASK_STEP"] = found.mask.view.strides[3]
        definitions["mask_t"] = dialect.storage[kind.name]
    return definitions


def _values(found: _Attention) -> dict[str, int]:
    mask = {"mask_batch": 0, "mask_head": 0, "mask_row": 0}
    if found.mask is not None:
        mask = {name: stride for name, stride in found.mask.strides("mask").items() if name in mask}
    return {
        "rows": found.q.view.shape[2],
        "length": found.length,
        "heads": found.shared,
        "groups": found.k.view.shape[1],
        "part": found.part,
        "all_rows": found.all_rows,
        **found.q.strides("q"),
        **found.k.strides("k"),
        **found.v.strides("v"),
        **mask,
    }


def _grid(found: _Attention) -> tuple[int, int, int]:
    batch, groups = found.k.view.shape[:2]
    if batch * groups > MAX_GRID:
        raise OpRefusal(f"given {batch} * {groups} heads of keys, expected at most {MAX_GRID}")
    rows = found.shared * found.q.view.shape[2]
    return -(-rows // found.tile_rows), batch * groups, -(-found.length // found.part)


def _flops(found: _Attention) -> int:
    """Arithmetic of both products, whatever a mask closes."""
    return 2 * found.all_rows * found.length * (found.q.view.shape[3] + found.value_size)


def _lower_parts(found: _Attention, group: Group, lowering: Lowering, dialect: Dialect) -> list[Launch]:
    """Each part stores its sums, its largest score and the sum of its weights; a second launch puts them together."""
    grid = _grid(found)
    part_rows = grid[2] * found.all_rows
    scratch = lowering.scratch(part_rows * (found.value_size + 2) * FLOAT32.size)
    sums, rows = scratch, part_rows * found.value_size * FLOAT32.size
    inputs = _inputs(found)
    bindings = {name: len(inputs) + i for i, name in enumerate(("OUT_BUFFER", "PART_ROWS_BUFFER", "PARAMS_BUFFER"))}
    macros = {"GENERATED": "", **_definitions(found, dialect), "PARTIAL": 1, **bindings}
    defined = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    params = ParamStruct("Params", tuple(("int", name) for name in ATTENTION_FIELDS))
    body = "\n".join(map(kernel_file, ("tile.metal", "attention.metal")))
    first = Launch(
        label=" + ".join(group.nodes),
        kernel=assemble("attention", params, body, defined),
        args=(*inputs, TensorArg(sums, writes=True), TensorArg(scratch, rows, writes=True)),
        params=params.pack(_values(found)),
        grid=grid,
        block=(32 * found.simdgroups, 1, 1),
        flops=_flops(found),
        nbytes=traffic_of(group, lowering.tensors),
    )
    combine = anchor_kernel(
        *("attention_combine", group, lowering, dialect, _DIMS, 2, COMBINE_FIELDS),
        {"VALUE_SIZE": found.value_size},
        ("store.metal",),
    )
    values = {"rows": found.q.view.shape[2], "all_rows": found.all_rows, "parts": grid[2]}
    threads = found.all_rows * -(-found.value_size // GROUP)
    flops = 4 * part_rows * found.value_size
    arguments = [TensorArg(sums), TensorArg(scratch, rows)]
    return [first, combine.launch(arguments, values, (-(-threads // TILE_THREADS), 1, 1), TILE_THREADS, flops)]
