"""8-bit floats with a scale for each block of rows and columns, as DeepSeek and Qwen3 publish them.

Layout: ``weight`` float8_e4m3fn [rows, columns] and ``weight_scale_inv`` [rows / 128, columns / 128], rounded up, which
multiplies for all its name; or ``weight_scale``, one number for all or for each row.
"""

from __future__ import annotations

import numpy as np

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import CodedMatrix
from npu_compiler.frontend.checkpoints.importer import Config, Importer, option
from npu_compiler.frontend.checkpoints.tensors import Tensors
from npu_compiler.integers import ceil_div

__all__ = ["BlockFp8"]

_KINDS = ("float8_e4m3fn",)
_SCALES = ("float32", "bfloat16", "float16")


class BlockFp8(Importer):
    """``quant_method: fp8``."""

    default_dtype = "bfloat16"

    def __init__(self, config: Config) -> None:
        option(config, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        block = config.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        ):
            raise ExtractionError(f"given weight_block_size={block!r}, expected rows and columns of a block, or none")
        self._block: list[int] | None = block

    def matrix(self, module: str, shape: tuple[int, int], tensors: Tensors) -> CodedMatrix | None:
        name, inverse, plain = (f"{module}.{suffix}" for suffix in ("weight", "weight_scale_inv", "weight_scale"))
        if inverse not in tensors and plain not in tensors:
            return None
        rows, columns = shape
        tensors.skip(f"{module}.input_scale", f"{module}.activation_scale")
        codes = tensors.take(name, shape, _KINDS)
        if inverse in tensors:
            if self._block is None:
                raise ExtractionError(
                    f"'{inverse}': given scales of blocks, expected 'weight_block_size' to say of which"
                )
            height, width = self._block
            scales = tensors.take(inverse, (ceil_div(rows, height), ceil_div(columns, width)), _SCALES)
            return CodedMatrix(shape, 8, codes, columns, scales, width, rows=height, scales_name=inverse)
        scales = tensors.take(plain, None, _SCALES)
        if scales.size not in (1, rows):
            raise ExtractionError(f"'{plain}': given the shape {list(scales.shape)}, expected 1 or {rows} numbers")
        each = np.ascontiguousarray(scales.reshape(-1, 1))
        height = rows if scales.size == 1 else 1
        return CodedMatrix(shape, 8, codes, columns, each, columns, rows=height, scales_name=plain)
