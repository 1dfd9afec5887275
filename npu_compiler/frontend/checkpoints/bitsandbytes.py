"""bitsandbytes: 4-bit codes of a codebook in blocks along the whole weight, and integers of a byte for each row.

Layout: ``weight`` uint8 [elements / 2, 1], the first of two codes in the high bits, with ``absmax`` of each block,
which ``nested_*`` tensors may quantise once more, ``quant_map`` and a JSON text; or int8 with ``SCB`` for each row.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any

import numpy as np

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import Array, CodedMatrix
from npu_compiler.frontend.checkpoints.importer import Config, Importer
from npu_compiler.frontend.checkpoints.tensors import Tensors
from npu_compiler.integers import ceil_div

__all__ = ["BitsAndBytes"]

_KINDS = ("nf4", "fp4")
_LARGEST = 127.0


class BitsAndBytes(Importer):
    """``quant_method: bitsandbytes``."""

    default_dtype = "bfloat16"

    def __init__(self, config: Config) -> None:
        if not (config.get("load_in_4bit") or config.get("load_in_8bit") or config.get("_load_in_4bit")):
            raise ExtractionError("given neither load_in_4bit nor load_in_8bit, expected one of them to be true")

    def matrix(self, module: str, shape: tuple[int, int], tensors: Tensors) -> CodedMatrix | None:
        name = f"{module}.weight"
        if f"{module}.SCB" in tensors:
            tensors.skip(f"{module}.weight_format")
            largest = tensors.take(f"{module}.SCB", (shape[0],), ("float32",))
            codes = tensors.take(name, shape, ("int8",))
            scales = (largest * np.float32(1 / _LARGEST)).reshape(-1, 1)
            return CodedMatrix(shape, 8, codes, shape[1], scales, shape[1], may_be_zero=True)
        kind = next((kind for kind in _KINDS if f"{name}.quant_state.bitsandbytes__{kind}" in tensors), None)
        return None if kind is None else _of_blocks(name, kind, shape, tensors)


def _of_blocks(name: str, kind: str, shape: tuple[int, int], tensors: Tensors) -> CodedMatrix:
    state = _state(f"{name}.quant_state.bitsandbytes__{kind}", shape, tensors)
    count, block = prod(shape), int(state["blocksize"])
    stored = tensors.take(name, (ceil_div(count, 2), 1), ("uint8",)).reshape(-1)
    codes = (stored >> np.uint8(4)) | (stored << np.uint8(4))
    rows, columns = shape if shape[1] % block == 0 else (1, count)
    groups = ceil_div(columns, block)
    scales = _largest(name, state, (rows, groups), tensors)
    codebook = tensors.take(f"{name}.quant_map", (16,), ("float32",))
    return CodedMatrix(shape, 4, codes.reshape(rows, -1), columns, scales, block, codebook=codebook, may_be_zero=True)


def _largest(name: str, state: dict[str, Any], groups: tuple[int, int], tensors: Tensors) -> Array | CodedMatrix:
    """The largest magnitude of each block, by which its numbers are multiplied."""
    count = prod(groups)
    if f"{name}.nested_absmax" not in tensors:
        return tensors.take(f"{name}.absmax", (count,), ("float32",)).reshape(groups)
    size = int(state["nested_blocksize"])
    scales = tensors.take(f"{name}.nested_absmax", (ceil_div(count, size),), ("float32",)).reshape(1, -1)
    return CodedMatrix(
        groups,
        8,
        tensors.take(f"{name}.absmax", (count,), ("uint8",)).reshape(1, -1),
        count,
        scales,
        size,
        biases=np.full_like(scales, state["nested_offset"]),
        codebook=tensors.take(f"{name}.nested_quant_map", (256,), ("float32",)),
        may_be_zero=True,
    )


def _state(name: str, shape: tuple[int, int], tensors: Tensors) -> dict[str, Any]:
    """What the JSON text beside a weight says of it."""
    text = tensors.take(name, None, ("uint8",)).tobytes()
    try:
        state = json.loads(text)
    except ValueError as error:
        raise ExtractionError(f"'{name}': given bytes that are not JSON ({error}); download it again") from error
    known = isinstance(state, dict) and type(state.get("blocksize")) is int and state["blocksize"] > 1
    if not known or tuple(state.get("shape") or ()) != shape:
        raise ExtractionError(f"'{name}': given {text[:80]!r}, expected a block size and the shape {list(shape)}")
    return dict(state)
