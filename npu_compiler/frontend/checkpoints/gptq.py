"""GPTQ: integers packed along the inputs, zero points that the first version stores less one, and an order of inputs.

Layout: AutoGPTQ's and GPTQModel's ``qweight`` [columns * bits / 32, rows], ``qzeros`` [groups, rows * bits / 32],
``scales`` [groups, rows] and ``g_idx`` [columns].
"""

from __future__ import annotations

import re

import numpy as np

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import Array, CodedMatrix
from npu_compiler.frontend.checkpoints.importer import Config, Importer, group_size, number, option
from npu_compiler.frontend.checkpoints.packing import pack, unpack, words
from npu_compiler.frontend.checkpoints.tensors import Tensors

__all__ = ["Gptq", "order_of_groups"]

_BITS = (2, 3, 4, 8)
_SCALES = ("float16", "bfloat16", "float32")


class Gptq(Importer):
    """``quant_method: gptq``."""

    def __init__(self, config: Config) -> None:
        option(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        option(config, "bits", _BITS)
        number(config, "group_size", -1, 1 << 20)
        self._config = config

    def matrix(self, module: str, shape: tuple[int, int], tensors: Tensors) -> CodedMatrix | None:
        name = f"{module}.qweight"
        if name not in tensors:
            return None
        config = self._config_of(module)
        bits = int(option(config, "bits", _BITS))
        rows, columns = shape
        group = group_size(name, number(config, "group_size", -1, 1 << 20), columns)
        groups = columns // group
        packed = tensors.take(name, (columns * bits // 32, rows), ("int32", "uint32"))
        zeros = tensors.take(f"{module}.qzeros", (groups, rows * bits // 32), ("int32", "uint32"))
        scales = tensors.take(f"{module}.scales", (groups, rows), _SCALES)
        stored = unpack(words(zeros), bits, rows).T
        first = config.get("checkpoint_format", "gptq") == "gptq"
        points = (stored + np.uint8(first)) & np.uint8((1 << bits) - 1)
        codes = words(packed.T)
        order = order_of_groups(f"{module}.g_idx", tensors, columns, group)
        if order is not None:
            codes = pack(unpack(codes, bits, columns)[:, order], bits)
        alike = points.size > 0 and bool((points == points.flat[0]).all())
        return CodedMatrix(
            shape,
            bits,
            codes,
            columns,
            np.ascontiguousarray(scales.T),
            group,
            zero=int(points.flat[0]) if alike else 0,
            zeros=None if alike else pack(np.ascontiguousarray(points), bits),
            permutation=order,
            scales_name=f"{module}.scales",
        )

    def _config_of(self, module: str) -> Config:
        """The configuration, with what ``dynamic`` says of a module."""
        for pattern, changed in (self._config.get("dynamic") or {}).items():
            if re.match(pattern.removeprefix("+:"), module):
                return {**self._config, **changed}
        return self._config


def order_of_groups(name: str, tensors: Tensors, columns: int, group: int) -> Array | None:
    """The order of the inputs in which their groups follow each other; None where it is their own."""
    groups = tensors.take_if_there(name, (columns,), ("int32", "int64"))
    if groups is None or (groups == np.arange(columns) // group).all():
        return None
    inside = groups.size > 0 and groups.min() >= 0 and groups.max() < columns // group  # else counting takes memory
    if not inside or (np.bincount(groups, minlength=columns // group) != group).any():
        raise ExtractionError(f"'{name}': given groups of different sizes, expected {group} columns in each")
    return np.argsort(groups, kind="stable").astype(np.int64)
