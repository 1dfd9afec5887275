"""Lowers attention: one launch, after one that sums up the mask for all layers that share it."""

from __future__ import annotations

from dataclasses import dataclass

from cuda_compiler.anchors import anchor_launch, anchor_source
from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import pack_size, resolve_anchor
from cuda_compiler.skeleton import assemble
from cuda_compiler.tiles import MULTIPROCESSORS
from npu_compiler.codegen.grouping import Group
from npu_compiler.codegen.operands import MAX_ELEMENTS, TensorArg
from npu_compiler.codegen.params import ParamStruct
from npu_compiler.codegen.target import Launch, Lowering
from npu_compiler.dtypes import BFLOAT16, BOOL, FLOAT16, FLOAT32
from npu_compiler.expr import Ref
from npu_compiler.symbolic import OpRefusal
from npu_compiler.trace import TracedTensor
from npu_compiler.view import View

__all__ = ["lower_attention"]

_MAX_HEAD_SIZE = 256
_MAX_GRID = 65535
_CHUNK = 8  # elements of 16 bytes
_SLOTS = 3  # as in attention_tile.cuh
_DIMS = ((0, 1), (2,), (3,))
_SPLIT_TILES = 2  # blocks of positions that are worth a block of threads
_ALONE_TILES = 4  # that one block of threads computes sooner than several would put their parts together
_STATE_THREADS = 128
_FILES = ("mask.cuh", "tensor_cores.cuh", "attention_tile.cuh", "attention_store.cuh")


@dataclass(frozen=True)
class _Operand:
    """A tensor [batch, heads, rows, size] as the kernel reads it."""

    tensor: TracedTensor
    view: View

    @property
    def argument(self) -> TensorArg:
        return TensorArg(self.tensor.index, self.view.offset * self.tensor.dtype.size)

    @property
    def chunk(self) -> int:
        """Elements that are copied at a time along a row."""
        *outer, step = self.view.strides
        aligned = all(number % _CHUNK == 0 for number in (self.view.offset, self.view.shape[-1], *outer))
        return _CHUNK if step == 1 and aligned else 1

    def strides(self, name: str) -> dict[str, int]:
        parts = ("batch", "head", "row", "step")
        return {f"{name}_{part}": stride for part, stride in zip(parts, self.view.strides, strict=True)}


@dataclass(frozen=True)
class _Attention:
    """What is to be computed, and how it is divided.

    Attributes:
        block: Positions of a step.
        warps_m, warps_l: How warps share the rows and the positions of a step.
        splits: Blocks of threads that share the positions of a row.
    """

    q: _Operand
    k: _Operand
    v: _Operand
    mask: _Operand | None
    scale: float
    causal: bool
    block: int
    warps_m: int
    warps_l: int
    splits: int

    @property
    def shared(self) -> int:
        """Query heads that share a head of keys and values."""
        return self.q.view.shape[1] // self.k.view.shape[1]

    @property
    def rows(self) -> int:
        return self.q.view.shape[2]

    @property
    def length(self) -> int:
        return self.k.view.shape[2]

    @property
    def tiles(self) -> int:
        return -(-self.length // self.block)

    @property
    def row_tiles(self) -> int:
        return -(-self.shared * self.rows // (16 * self.warps_m))

    @property
    def state_rows(self) -> int:
        """Rows of the mask that are summed up together."""
        return min(self.rows, 16 * self.warps_m)

    @property
    def width(self) -> int:
        """Columns of a tile of values."""
        return _padded(self.v.view.shape[3])

    @property
    def shared_bytes(self) -> int:
        query, values = _padded(self.q.view.shape[3]), self.width
        rows = 16 * self.warps_m
        ring = _SLOTS * self.block * max(_pitch(query), _pitch(values)) * 2
        return max(ring, rows * _pitch(query) * 2, rows * self.splits * 4)


def lower_attention(group: Group, lowering: Lowering) -> list[Launch]:
    """``softmax(q @ k.T * scale + mask) @ v`` for each head, without storing the scores.

    Raises:
        OpRefusal: A head is larger than 256, data types differ, or a tensor is too large.
    """
    found = _attention(group, lowering)
    positions = resolve_anchor(group, lowering, _DIMS)
    launches, states = ([], found.k.argument) if found.mask is None else _mask_states(found, found.mask, lowering)
    batch, groups = found.k.view.shape[:2]
    tiles = found.row_tiles * batch * groups
    parts = found.k.argument
    if found.splits > 1:
        rows = tiles * found.splits * 16 * found.warps_m
        parts = TensorArg(lowering.scratch(rows * (found.width + 2) * FLOAT32.size), writes=True)
    mask = found.k if found.mask is None else found.mask
    launch = anchor_launch(
        "attention",
        group,
        lowering,
        positions,
        size=min(2, pack_size(group, positions.operands, group.shape[-1])),
        inputs=(found.q.argument, found.k.argument, found.v.argument, mask.argument, states, parts),
        values=_values(found),
        macros={**_macros(found), "RESULT_TILES": tiles, "STATES_READY": int(not launches)},
        flops=2 * batch * groups * found.shared * found.rows * found.length * (found.q.view.shape[3] + found.width),
        blocks=found.row_tiles,
        threads=32 * found.warps_m * found.warps_l,
        splits=found.splits,
        layers=batch * groups,
        shared_bytes=found.shared_bytes,
        parts=_FILES,
    )
    return [*launches, launch]


def _attention(group: Group, lowering: Lowering) -> _Attention:
    anchor = anchor_source(group)
    operands = [_operand(ref, lowering) for ref in anchor.operands]
    q, k, v = operands[:3]
    mask = operands[3] if len(operands) > 3 else None
    size, value_size, length = q.view.shape[3], v.view.shape[3], k.view.shape[2]
    if min(size, value_size, length) < 1 or max(size, value_size) > _MAX_HEAD_SIZE:
        given = f"heads of {size} and {value_size} over {length} positions"
        raise OpRefusal(f"given {given}, expected heads of 1 to {_MAX_HEAD_SIZE} and at least one position")
    dtypes = {operand.tensor.dtype for operand in (q, k, v)}
    if len(dtypes) != 1 or not dtypes <= {FLOAT16, BFLOAT16}:
        given = ", ".join(str(operand.tensor.dtype) for operand in (q, k, v))
        raise OpRefusal(f"given query, key and value of {given}, expected all of float16 or all of bfloat16")
    batch, groups = k.view.shape[:2]
    if batch * groups > _MAX_GRID:
        raise OpRefusal(f"given {batch} * {groups} heads of keys, expected at most {_MAX_GRID}")
    rows = q.view.shape[1] // groups * q.view.shape[2]
    block = 64 if max(_padded(size), _padded(value_size)) <= 128 else 32
    warps_m, warps_l = _warps(rows, block)
    blocks = batch * groups * -(-rows // (16 * warps_m))
    splits = _splits(-(-length // block), blocks)
    scale, causal = float(anchor.attrs["scale"]), bool(anchor.attrs["causal"])
    return _Attention(q, k, v, mask, scale, causal, block, warps_m, warps_l, splits)


def _operand(ref: Ref, lowering: Lowering) -> _Operand:
    tensor = lowering.tensors[ref.tensor]
    if tensor.layout.size >= MAX_ELEMENTS:
        raise OpRefusal(f"'{tensor.name}' has {tensor.layout.size} elements, at most 2^31 are read")
    return _Operand(tensor, ref.view)


def _padded(size: int) -> int:
    return -(-size // 16) * 16


def _pitch(width: int) -> int:
    """Elements from one row of a tile to the next; see `place` in attention_tile.cuh."""
    return width if width % 64 == 0 else width + _CHUNK


def _warps(rows: int, block: int) -> tuple[int, int]:
    """Warps along the rows, 16 each, and along the positions of a block, at least 16 each."""
    if rows > 64:
        return (8, 1) if block == 64 else (4, 1)
    along_rows = 1 if rows <= 16 else 2 if rows <= 32 else 4
    return along_rows, max(1, min(4, block // 16) // along_rows)


def _splits(tiles: int, blocks: int) -> int:
    """Blocks of threads for the positions of one tile of rows, where the rows alone leave the device idle."""
    return max(1, min(MULTIPROCESSORS // blocks, -(-tiles // _SPLIT_TILES)))


def _macros(found: _Attention) -> dict[str, object]:
    mask = found.mask.tensor.dtype if found.mask is not None else BOOL
    return {
        "tile_t": CUDA.storage[found.q.tensor.dtype.name],
        "HEAD_SIZE": found.q.view.shape[3],
        "VALUE_SIZE": found.v.view.shape[3],
        "GROUPS": found.k.view.shape[1],
        "SHARED": found.shared,
        "LENGTH": found.length,
        "BLOCK": found.block,
        "WARPS_M": found.warps_m,
        "WARPS_L": found.warps_l,
        "SPLITS": found.splits,
        "SPLIT_TILES": _SPLIT_TILES,
        "ALONE_TILES": _ALONE_TILES,
        "Q_CHUNK": found.q.chunk,
        "K_CHUNK": found.k.chunk,
        "V_CHUNK": found.v.chunk,
        "SCALE": CUDA.literal(found.scale, FLOAT32),
        "CAUSAL": int(found.causal),
        "MASK": int(found.mask is not None),
        "STATE_ROWS": found.state_rows,
        "mask_t": CUDA.storage[mask.name],
        "MASK_CLOSED": _closed(found),
    }


def _closed(found: _Attention) -> str:
    """What a mask adds at most where it closes a position.

    Minus infinity, or a number so low that the weight vanishes beside any position that is open.
    """
    kind = found.mask.tensor.dtype if found.mask is not None else BOOL
    return CUDA.literal(-65504.0 if kind == FLOAT16 else -1e37, FLOAT32)


def _values(found: _Attention) -> dict[str, int]:
    mask = dict.fromkeys(("mask_batch", "mask_head", "mask_row", "mask_step"), 0)
    states = dict.fromkeys(("state_batch", "state_head", "state_parts"), 0)
    if found.mask is not None:
        mask = found.mask.strides("mask")
        _, heads = _distinct(found.mask.view)
        states = {
            "state_batch": heads if found.mask.view.strides[0] else 0,
            "state_head": 1 if heads > 1 else 0,
            "state_parts": -(-found.rows // found.state_rows),
        }
    rows = {"rows": found.rows}
    return {**rows, **found.q.strides("q"), **found.k.strides("k"), **found.v.strides("v"), **mask, **states}


def _distinct(mask: View) -> tuple[int, int]:
    """How many masks there are along the batch and along the heads."""
    batch, heads = (n if stride else 1 for n, stride in zip(mask.shape[:2], mask.strides[:2], strict=True))
    return batch, heads


def _mask_states(found: _Attention, mask: _Operand, lowering: Lowering) -> tuple[list[Launch], TensorArg]:
    """What each block of the mask does, and the launch that finds out unless an earlier layer's did."""
    batch, heads = _distinct(mask.view)
    parts = -(-found.rows // found.state_rows)
    if batch * heads > _MAX_GRID or parts > _MAX_GRID:
        raise OpRefusal(f"given {batch * heads} masks of {found.rows} rows, expected at most {_MAX_GRID} of each")
    key = ("mask states", mask.tensor.index, mask.view, found.state_rows, found.block)
    buffer, is_new = lowering.common_scratch(key, batch * heads * parts * found.tiles)
    if not is_new:
        return [], TensorArg(buffer)
    names = ("batch", "head", "row", "step")
    values = {
        "rows": found.rows,
        "length": found.length,
        "heads": heads,
        **{f"mask_{name}": stride for name, stride in zip(names, mask.view.strides, strict=True)},
    }
    struct = ParamStruct("Params", tuple(("int", name) for name in values))
    macros = {
        "mask_t": CUDA.storage[mask.tensor.dtype.name],
        "STATE_ROWS": found.state_rows,
        "BLOCK": found.block,
        "MASK_CLOSED": _closed(found),
    }
    launch = Launch(
        label=f"open blocks of {mask.tensor.name}",
        kernel=assemble("mask_states", struct, macros, "", after=("mask.cuh",)),
        args=(mask.argument, TensorArg(buffer, writes=True)),
        params=struct.pack(values),
        grid=(found.tiles, parts, batch * heads),
        block=(_STATE_THREADS, 1, 1),
        nbytes=batch * heads * found.rows * found.length * mask.tensor.dtype.size,
    )
    return [launch], TensorArg(buffer)
