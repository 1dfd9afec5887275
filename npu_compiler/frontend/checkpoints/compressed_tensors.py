"""compressed-tensors: packed integers, bytes and small floats, by groups of a configuration.

Layout: ``weight_packed`` int32 [rows, columns * bits / 32] or ``weight`` [rows, columns], ``weight_scale`` and, of
asymmetric weights, ``weight_zero_point``; packed integers are stored with half of their range added. Floats of four
bits: ``weight_packed`` uint8 [rows, columns / 2], the first of two in the low bits, with scales of a byte in groups:
powers of two (MXFP4), or 8-bit floats that ``weight_global_scale`` divides (NVFP4).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import Array, CodedMatrix
from npu_compiler.frontend.checkpoints.gptq import order_of_groups
from npu_compiler.frontend.checkpoints.importer import Config, Importer, group_size, number, option, skips
from npu_compiler.frontend.checkpoints.packing import pack, unpack, words
from npu_compiler.frontend.checkpoints.small_floats import E2M1, floats_of_a_byte, powers_of_two, times
from npu_compiler.frontend.checkpoints.tensors import Tensors
from npu_compiler.integers import ceil_div

__all__ = ["CompressedTensors"]

_INTEGERS = ("pack-quantized", "int-quantized", "naive-quantized", "dense")
_FLOATS = ("float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
_FORMATS = (*_INTEGERS, *_FLOATS)
_SCALES = ("float16", "bfloat16", "float32")
_CLASSES = ("Linear", "Embedding")


class CompressedTensors(Importer):
    """``quant_method: compressed-tensors``."""

    default_dtype = "bfloat16"

    def __init__(self, config: Config) -> None:
        option(config, "format", (*_FORMATS, None, "mixed-precision"))
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise ExtractionError(f"given config_groups={groups!r:.60}, expected what each group of layers stores")
        self._groups = [group for group in groups.values() if isinstance(group, dict)]
        for group in self._groups:
            option({"format": group.get("format")}, "format", (*_FORMATS, None))
        self._ignored = skips(config.get("ignore") or ())

    def matrix(self, module: str, shape: tuple[int, int], tensors: Tensors) -> CodedMatrix | None:
        packed, scale = f"{module}.weight_packed", f"{module}.weight_scale"
        if packed not in tensors and scale not in tensors:
            return None
        weights = self._weights_of(module)
        tensors.skip(*(f"{module}.{name}" for name in ("weight_shape", "input_scale", "input_zero_point")))
        bits = number(weights, "num_bits", 2, 8)
        rows, columns = shape
        if packed not in tensors:
            return self._of_bytes(module, shape, weights, tensors)
        if option(weights, "type", ("int", "float"), "int") == "float":
            return _of_small_floats(module, shape, weights, tensors)
        width = ceil_div(columns * bits, 32)
        codes = words(tensors.take(packed, (rows, width), ("int32", "uint32")))[:, : ceil_div(columns * bits, 8)]
        group = _group(scale, weights, columns)
        scales = tensors.take(scale, (rows, columns // group), _SCALES)
        points = tensors.take_if_there(f"{module}.weight_zero_point")
        zeros = None if points is None else _zero_points(f"{module}.weight_zero_point", points, scales.shape, bits)
        order = order_of_groups(f"{module}.weight_g_idx", tensors, columns, group)
        if order is not None:
            codes = pack(unpack(codes, bits, columns)[:, order], bits)
        zero = 1 << (bits - 1)
        return CodedMatrix(
            shape,
            bits,
            np.ascontiguousarray(codes),
            columns,
            scales,
            group,
            zero=zero,
            zeros=None if zeros is None or (zeros == zero).all() else pack(zeros, bits),
            permutation=order,
            scales_name=scale,
        )

    def activations(self, module: str) -> str | None:
        found = (self._group_of(module) or {}).get("input_activations")
        if not isinstance(found, dict) or found.get("dynamic") is not True or found.get("strategy") != "token":
            return None
        if found.get("num_bits") != 8 or found.get("symmetric") is not True:
            return None
        return "fp8" if found.get("type") == "float" else "int8"

    def _of_bytes(self, module: str, shape: tuple[int, int], weights: Config, tensors: Tensors) -> CodedMatrix:
        """Weights of a byte each: integers, or 8-bit floats."""
        name, scale, (rows, columns) = f"{module}.weight", f"{module}.weight_scale", shape
        kind = "float8_e4m3fn" if option(weights, "type", ("int", "float"), "int") == "float" else "int8"
        codes = tensors.take(name, shape, (kind,))
        if kind != "int8" and weights.get("strategy") == "group":
            return _with_small_scales(module, CodedMatrix(shape, 8, codes, columns, codes, columns), weights, tensors)
        scales = tensors.take(scale, None, _SCALES)
        points = tensors.take_if_there(f"{module}.weight_zero_point")
        block = weights.get("block_structure")
        if weights.get("strategy") == "block":
            if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
                raise ExtractionError(
                    f"'{name}': given block_structure={block!r}, expected rows and columns of a block"
                )
            return CodedMatrix(shape, 8, codes, columns, scales, block[1], rows=block[0], scales_name=scale)
        if scales.size == 1:
            scales, group, height = scales.reshape(1, 1), columns, rows
        else:
            group, height = _group(scale, weights, columns), 1
            scales = tensors.take(scale, (rows, columns // group))
        made = CodedMatrix(shape, 8, codes, columns, scales, group, rows=height, scales_name=scale)
        if points is None or not np.any(points):
            return made
        if kind != "int8":
            raise ExtractionError(f"'{module}.weight_zero_point': given zero points of 8-bit floats, expected none")
        shifted = (points.astype(np.int16) + 128).astype(np.uint8).reshape(scales.shape)
        codes = codes.view(np.uint8) ^ np.uint8(128)  # from -128 to 127 as 0 to 255
        return replace(made, codes=codes, zeros=shifted)

    def _weights_of(self, module: str) -> dict[str, Any]:
        """What the configuration says of a module's weights."""
        if self._ignored(module):
            raise ExtractionError(
                f"'{module}': given codes and scales for a module that 'ignore' lists, expected plain weights"
            )
        found = self._group_of(module)
        weights = None if found is None else found.get("weights")
        if not isinstance(weights, dict):
            raise ExtractionError(f"'{module}': given codes, expected a group of 'config_groups' that describes them")
        return weights

    def _group_of(self, module: str) -> dict[str, Any] | None:
        """The group of layers that a module belongs to."""
        found = None
        for group in self._groups:
            targets = [str(target) for target in group.get("targets") or ()]
            if skips(target for target in targets if target not in _CLASSES)(module):
                return group
            if found is None and any(target in _CLASSES for target in targets):
                found = group
        return found


def _of_small_floats(module: str, shape: tuple[int, int], weights: Config, tensors: Tensors) -> CodedMatrix:
    """Floats of four bits."""
    if number(weights, "num_bits", 2, 8) != 4:
        raise ExtractionError(
            f"'{module}.weight_packed': given packed floats of {weights['num_bits']} bits, expected 4"
        )
    rows, columns = shape
    codes = tensors.take(f"{module}.weight_packed", (rows, columns // 2), ("uint8",))
    return _with_small_scales(module, CodedMatrix(shape, 4, codes, columns, codes, columns), weights, tensors)


def _with_small_scales(module: str, made: CodedMatrix, weights: Config, tensors: Tensors) -> CodedMatrix:
    """Small floats with the scales of their groups: 8-bit floats, powers of two in a byte, or half precision."""
    scale, (rows, columns) = f"{module}.weight_scale", made.shape
    group = _group(scale, weights, columns)
    scales = tensors.take(scale, (rows, columns // group), ("uint8", "float8_e8m0fnu", "float8_e4m3fn", *_SCALES))
    tensors.skip(f"{module}.input_global_scale")
    whole = f"{module}.weight_global_scale"
    own: Array | CodedMatrix = scales
    if scales.dtype.name in ("uint8", "float8_e8m0fnu"):
        own = powers_of_two(scales)
    elif scales.dtype.name == "float8_e4m3fn":
        own = times(whole, floats_of_a_byte(scales), tensors.take_if_there(whole, None, ("float32",)), divides=True)
    if tensors.take_if_there(f"{module}.weight_zero_point") is not None:
        raise ExtractionError(f"'{module}.weight_zero_point': given zero points of small floats, expected none")
    return replace(made, scales=own, group=group, codebook=E2M1 if made.bits == 4 else None, scales_name=scale)


def _group(name: str, weights: Config, columns: int) -> int:
    """How many columns share a scale: all of them, unless the strategy has groups."""
    given = weights.get("group_size") if weights.get("strategy") in ("group", "tensor_group", None) else None
    return group_size(name, given if isinstance(given, int) and given > 0 else -1, columns)


def _zero_points(name: str, points: Array, groups: tuple[int, ...], bits: int) -> Array:
    """[rows, groups] of uint8, from the packed form along rows or from one integer each."""
    rows, count = groups
    if points.dtype.name == "int8":
        if points.shape != groups:
            raise ExtractionError(f"'{name}': given the shape {list(points.shape)}, expected {list(groups)}")
        return (points.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    if points.shape != (ceil_div(rows * bits, 32), count):
        expected = [ceil_div(rows * bits, 32), count]
        raise ExtractionError(f"'{name}': given the shape {list(points.shape)}, expected {expected}")
    return np.ascontiguousarray(unpack(words(points.T), bits, rows).T)
