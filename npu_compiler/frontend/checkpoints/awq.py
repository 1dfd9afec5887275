"""AWQ: 4-bit integers with zero points; packed along the outputs in turns (``gemm``), or along the inputs (``gemv``).

Layout: AutoAWQ's ``qweight`` [columns, rows / 8] with ``qzeros`` [groups, rows / 8] and ``scales`` [groups, rows]; or
``qweight`` [rows, columns / 8] with ``qzeros`` [rows, words] and ``scales`` [rows, 8 * words].
"""

from __future__ import annotations

import numpy as np

from npu_compiler.frontend.checkpoints.form import Array, CodedMatrix
from npu_compiler.frontend.checkpoints.importer import Config, Importer, group_size, number, option
from npu_compiler.frontend.checkpoints.packing import pack, unpack, words
from npu_compiler.frontend.checkpoints.tensors import Tensors
from npu_compiler.integers import ceil_div

__all__ = ["Awq"]

_BITS = 4
_TURNS = (0, 4, 1, 5, 2, 6, 3, 7)  # where the columns of a word of ``gemm`` lie in it
_INTEGERS = ("int32", "uint32")
_SCALES = ("float16", "bfloat16", "float32")


class Awq(Importer):
    """``quant_method: awq``."""

    def __init__(self, config: Config) -> None:
        option({"bits": config.get("bits", config.get("w_bit", _BITS))}, "bits", (_BITS,))
        self._version = str(
            option({"version": str(config.get("version", "gemm")).lower()}, "version", ("gemm", "gemv"))
        )
        option(config, "zero_point", (True,), True)
        named = {"group_size": config.get("group_size", config.get("q_group_size", 128))}
        self._group_size = number(named, "group_size", -1, 1 << 20)

    def matrix(self, module: str, shape: tuple[int, int], tensors: Tensors) -> CodedMatrix | None:
        name = f"{module}.qweight"
        if name not in tensors:
            return None
        rows, columns = shape
        group = group_size(name, self._group_size, columns)
        groups = columns // group
        if self._version == "gemm":
            codes = pack(_in_order(tensors.take(name, (columns, rows // 8), _INTEGERS)).T, _BITS)
            points = pack(_in_order(tensors.take(f"{module}.qzeros", (groups, rows // 8), _INTEGERS)).T, _BITS)
            scales = tensors.take(f"{module}.scales", (groups, rows), _SCALES).T
        else:
            codes = words(tensors.take(name, (rows, columns // 8), _INTEGERS))
            stored = words(tensors.take(f"{module}.qzeros", (rows, None), _INTEGERS))
            points = pack(unpack(stored, _BITS, groups), _BITS)
            scales = tensors.take(f"{module}.scales", (rows, 2 * stored.shape[1]), _SCALES)[:, :groups]
            if stored.shape[1] < ceil_div(groups, 2):
                tensors.take(f"{module}.qzeros", (rows, ceil_div(groups, 8)))
        own = np.ascontiguousarray(scales)
        return CodedMatrix(shape, _BITS, codes, columns, own, group, zeros=points, scales_name=f"{module}.scales")


def _in_order(packed: Array) -> Array:
    """The integers of words along the last dimension, of which each holds eight in turns."""
    stored = unpack(words(packed), _BITS, 8 * packed.shape[-1])
    turned = stored.reshape(*packed.shape, 8)[..., _TURNS]
    return turned.reshape(*packed.shape[:-1], -1)
