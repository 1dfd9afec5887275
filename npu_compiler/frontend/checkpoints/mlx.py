"""MLX: integers of 2 to 8 bits packed along the inputs, with a scale and a bias for each group; or small floats.

Layout: ``weight`` uint32 [rows, columns * bits / 32], ``scales`` and ``biases`` [rows, groups]; embeddings as well.
Small floats have ``scales`` of a byte and no biases.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import CodedMatrix
from npu_compiler.frontend.checkpoints.importer import Config, Importer, group_size, number, option
from npu_compiler.frontend.checkpoints.packing import words
from npu_compiler.frontend.checkpoints.small_floats import E2M1, floats_of_a_byte, powers_of_two
from npu_compiler.frontend.checkpoints.tensors import Tensors

__all__ = ["Mlx"]

_BITS = (2, 3, 4, 5, 6, 8)
_FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits and group of each
_SCALES = ("float16", "bfloat16", "float32")


class Mlx(Importer):
    """The configuration's ``quantization``, with a mode, a group size, bits, and what differs for some paths."""

    default_dtype = "bfloat16"

    def __init__(self, config: Config) -> None:
        self._config = config
        self._check(config)

    @staticmethod
    def _check(config: Config) -> None:
        mode = option(config, "mode", ("affine", *_FLOATS), "affine")
        option(config, "bits", _BITS)
        number(config, "group_size", 1, 1 << 20)
        if mode in _FLOATS and (config["bits"], config["group_size"]) != _FLOATS[mode]:
            bits, group = _FLOATS[mode]
            given = f"{config['bits']} bits in groups of {config['group_size']}"
            raise ExtractionError(f"given {given} for '{mode}', expected {bits} and {group}")

    def matrix(self, module: str, shape: tuple[int, int], tensors: Tensors) -> CodedMatrix | None:
        name = f"{module}.weight"
        if f"{module}.scales" not in tensors:
            return None
        own: Any = self._config.get(module, {})
        if own is False:
            raise ExtractionError(f"'{module}.scales': given scales of a module that the configuration leaves plain")
        config = {**self._config, **(own if isinstance(own, dict) else {})}
        self._check(config)
        bits, (rows, columns) = int(config["bits"]), shape
        group = group_size(name, config["group_size"], columns)
        sizes = (rows, columns // group)
        codes = words(tensors.take(name, (rows, columns * bits // 32), ("uint32", "int32")))
        if config.get("mode", "affine") != "affine":
            own = tensors.take(f"{module}.scales", sizes, ("uint8",))
            scales = floats_of_a_byte(own) if config["mode"] == "nvfp4" else powers_of_two(own)
            codes, book = (codes, E2M1) if bits == 4 else (codes.view(ml_dtypes.float8_e4m3fn), None)
            named = f"{module}.scales"
            return CodedMatrix(shape, bits, codes, columns, scales, group, codebook=book, scales_name=named)
        return CodedMatrix(
            shape,
            bits,
            codes,
            columns,
            tensors.take(f"{module}.scales", sizes, _SCALES),
            group,
            biases=tensors.take(f"{module}.biases", sizes, _SCALES),
            may_be_zero=True,
        )
