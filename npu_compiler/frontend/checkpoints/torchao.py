"""torchao: integers and 8-bit floats in blocks, as it flattens its tensors for safetensors.

Layout: of the weight ``M.weight`` the tensors ``M._weight_qdata``, ``M._weight_scale`` and, of integers,
``M._weight_zero_point``; a JSON text in the header of the file says under ``M.weight`` which class of torchao they
make, and the block that shares a scale. ``Int8Tensor``, ``IntxUnpackedToInt8Tensor`` and ``Float8Tensor`` have one code
to a byte; ``Int4Tensor`` two, signed, the first in the low bits, with scales and biases [groups, rows]. ``MXTensor``
and ``NVFP4Tensor`` have small floats, two to a byte where they have four bits, and scales of a byte, which may lie in
tiles.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import Array, CodedMatrix
from npu_compiler.frontend.checkpoints.importer import Config, Importer, group_size
from npu_compiler.frontend.checkpoints.packing import pack
from npu_compiler.frontend.checkpoints.small_floats import E2M1, floats_of_a_byte, out_of_tiles, powers_of_two, times
from npu_compiler.frontend.checkpoints.tensors import Tensors
from npu_compiler.integers import ceil_div

__all__ = ["TorchAo"]

_SCALES = ("float32", "bfloat16", "float16")
_INTEGERS = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
_SMALL_FLOATS = ("MXTensor", "NVFP4Tensor")
_READ = ("Int4Tensor", "Float8Tensor", *_INTEGERS, *_SMALL_FLOATS)
_BITS = {"float4_e2m1fn_x2": 4, "float8_e4m3fn": 8, "float8_e5m2": 8}  # of an element of MXTensor
_WAY_OUT = "quantise it with its plain packing (int4_packing_format='plain'), or with `npu quantize`"


class TorchAo(Importer):
    """``quant_method: torchao``. What a weight is stands in the weight files alone."""

    default_dtype = "bfloat16"

    def __init__(self, config: Config) -> None:
        pass

    def matrix(self, module: str, shape: tuple[int, int], tensors: Tensors) -> CodedMatrix | None:
        name, codes = f"{module}.weight", f"{module}._weight_qdata"
        text = tensors.metadata.get(name)
        if text is None and codes not in tensors:
            return None
        kind, about = _described(name, text)
        if kind == "Tensor":
            return None
        if kind not in _READ:
            raise ExtractionError(f"'{name}': given torchao's '{kind}', expected one of {', '.join(_READ)}; {_WAY_OUT}")
        for other in ("act_pre_scale", "act_quant_scale"):
            if f"{module}._weight_{other}" in tensors:
                raise ExtractionError(
                    f"'{module}._weight_{other}': given a scale for activations, expected weights alone; {_WAY_OUT}"
                )
        if kind in _SMALL_FLOATS:
            return _of_small_floats(module, shape, kind, about, tensors)
        group, rows = _block(name, about.get("block_size"), shape)
        if kind == "Int4Tensor":
            return _packed(module, shape, group, tensors)
        return _of_bytes(module, shape, (group, rows), _bits(name, kind, about), tensors)


def _described(name: str, text: str | None) -> tuple[str, dict[str, Any]]:
    """The class that a weight is of, and what the file's header says of it."""
    try:
        found = json.loads(text or "")
        kind, about = found["_type"], found.get("_data", {})
    except (ValueError, KeyError, TypeError):
        found, kind, about = None, None, None
    if not isinstance(kind, str) or not isinstance(about, dict):
        raise ExtractionError(
            f"'{name}': given {str(text)[:60]!r} in the header of its file, expected the class that torchao wrote "
            "there; save it with torchao's flatten_tensor_state_dict"
        )
    return kind, about


def _block(name: str, block: object, shape: tuple[int, int]) -> tuple[int, int]:
    """Columns and rows that share a scale."""
    if block is None or block == []:
        return shape[1], shape[0]
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise ExtractionError(f"'{name}': given block_size={block!r}, expected rows and columns of a block")
    return group_size(name, block[1], shape[1]), int(block[0])


def _bits(name: str, kind: str, about: dict[str, Any]) -> int:
    """Of a code; all but one class have eight."""
    if kind != "IntxUnpackedToInt8Tensor":
        return 8
    given = _named(about, "target_dtype")
    known = {f"int{bits}": bits for bits in range(2, 9)}
    if given not in known:
        raise ExtractionError(f"'{name}': given target_dtype={given!r}, expected {', '.join(known)}")
    return known[given]


def _named(about: dict[str, Any], key: str) -> Any:
    """The name of a data type."""
    given = about.get(key)
    return given.get("_data") if isinstance(given, dict) else given


def _packed(module: str, shape: tuple[int, int], group: int, tensors: Tensors) -> CodedMatrix:
    """Two codes to a byte: ``code * scale + bias``, where codes are signed."""
    rows, columns = shape
    codes = tensors.take(f"{module}._weight_qdata", (rows, columns // 2), ("int8", "uint8")).view(np.uint8)
    sizes = (columns // group, rows)
    scales = tensors.take(f"{module}._weight_scale", sizes, _SCALES)
    biases = tensors.take(f"{module}._weight_zero_point", sizes, _SCALES)
    return CodedMatrix(
        shape,
        4,
        codes ^ np.uint8(0x88),  # from -8 to 7 as 0 to 15
        columns,
        np.ascontiguousarray(scales.T),
        group,
        zero=8,
        biases=np.ascontiguousarray(biases.T) if np.any(biases) else None,
        scales_name=f"{module}._weight_scale",
    )


def _of_small_floats(
    module: str, shape: tuple[int, int], kind: str, about: dict[str, Any], tensors: Tensors
) -> CodedMatrix:
    """Floats of four bits or eight, with scales that are powers of two (MX) or 8-bit floats (NVFP4)."""
    name, scale, (rows, columns) = f"{module}._weight_qdata", f"{module}._weight_scale", shape
    element = "float4_e2m1fn_x2" if kind == "NVFP4Tensor" else _named(about, "elem_dtype")
    if element not in _BITS:
        raise ExtractionError(f"'{module}.weight': given elem_dtype={element!r}, expected {', '.join(_BITS)}")
    block, bits = about.get("block_size"), _BITS[element]
    if type(block) is not int:
        raise ExtractionError(f"'{module}.weight': given block_size={block!r}, expected the columns that share a scale")
    group = group_size(name, block, columns)
    codes = tensors.take(name, (rows, columns * bits // 8), ("uint8",) if bits == 4 else (element,))
    stored = tensors.take(scale, None, ("float8_e4m3fn" if kind == "NVFP4Tensor" else "float8_e8m0fnu", "uint8"))
    if about.get("is_swizzled_scales"):
        stored = out_of_tiles(scale, stored, rows, columns // group)
    else:
        stored = tensors.take(scale, (rows, columns // group))
    if kind == "NVFP4Tensor":
        whole = f"{module}._weight_per_tensor_scale"
        scales = times(whole, floats_of_a_byte(stored), tensors.take_if_there(whole, None, ("float32",)))
        tensors.skip(f"{module}._weight_act_per_tensor_scale")
    else:
        scales = powers_of_two(stored)
    book = E2M1 if bits == 4 else None
    return CodedMatrix(shape, bits, codes, columns, scales, group, codebook=book, scales_name=scale)


def _of_bytes(module: str, shape: tuple[int, int], block: tuple[int, int], bits: int, tensors: Tensors) -> CodedMatrix:
    """A code to a byte; integers of fewer bits are packed."""
    (rows, columns), (group, height) = shape, block
    codes = tensors.take(f"{module}._weight_qdata", shape, ("int8", "float8_e4m3fn"))
    sizes = (ceil_div(rows, height), columns // group)
    scales = _of_blocks(f"{module}._weight_scale", sizes, _SCALES, tensors)
    half, points = 1 << (bits - 1), None
    if f"{module}._weight_zero_point" in tensors:
        points = _of_blocks(f"{module}._weight_zero_point", sizes, ("int8", "int32", *_SCALES), tensors)
        points = None if not np.any(points) else (points.astype(np.float32) + half)
    own, zero, zeros = codes, 0, None
    if bits < 8 or points is not None:
        if codes.dtype != np.int8:
            raise ExtractionError(f"'{module}._weight_zero_point': given zero points of 8-bit floats, expected none")
        _check_range(f"{module}._weight_qdata", codes, half)
        own, zero = pack((codes.astype(np.int16) + half).astype(np.uint8), bits), half
    if points is not None:
        whole = points.astype(np.uint8)
        if (whole != points).any() or (points >= 2 * half).any():
            raise ExtractionError(f"'{module}._weight_zero_point': given zero points that are no codes of {bits} bits")
        zeros = pack(whole, bits)
    name = f"{module}._weight_scale"
    return CodedMatrix(shape, bits, own, columns, scales, group, rows=height, zero=zero, zeros=zeros, scales_name=name)


def _of_blocks(name: str, sizes: tuple[int, int], kinds: tuple[str, ...], tensors: Tensors) -> Array:
    """One number for each block; torchao leaves out dimensions where there is one for all."""
    found = tensors.take(name, None, kinds)
    if found.size != sizes[0] * sizes[1]:
        raise ExtractionError(f"'{name}': given the shape {list(found.shape)}, expected {list(sizes)}")
    return found.reshape(sizes)


def _check_range(name: str, codes: Array, half: int) -> None:
    if codes.size and (int(codes.min()) < -half or int(codes.max()) >= half):
        raise ExtractionError(
            f"'{name}': given codes from {codes.min()} to {codes.max()}, expected {-half} to {half - 1}"
        )
