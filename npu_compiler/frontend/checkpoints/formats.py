"""Which importer a model's configuration asks for."""

from __future__ import annotations

from typing import Any

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.awq import Awq
from npu_compiler.frontend.checkpoints.bitsandbytes import BitsAndBytes
from npu_compiler.frontend.checkpoints.block_fp8 import BlockFp8
from npu_compiler.frontend.checkpoints.compressed_tensors import CompressedTensors
from npu_compiler.frontend.checkpoints.gptq import Gptq
from npu_compiler.frontend.checkpoints.importer import Config, Importer, describing
from npu_compiler.frontend.checkpoints.mlx import Mlx
from npu_compiler.frontend.checkpoints.modelopt import ModelOpt
from npu_compiler.frontend.checkpoints.mxfp4 import Mxfp4
from npu_compiler.frontend.checkpoints.torchao import TorchAo

__all__ = ["importer_of"]

_BY_METHOD: dict[str, type[Importer]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": BlockFp8,
    "gptq": Gptq,
    "modelopt": ModelOpt,
    "mxfp4": Mxfp4,
    "torchao": TorchAo,
}


def importer_of(config: Config) -> Importer | None:
    """The importer of a checkpoint; None where its weights are plain numbers.

    Args:
        config: The content of ``config.json``.

    Raises:
        ExtractionError: The format is not one of those that are read, or described otherwise than it can be.
    """
    found: Any = config.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method is None:
        found = config.get("quantization", found)  # MLX writes it under both names
        if found is None:
            return None
        if not isinstance(found, dict) or not {"bits", "group_size"} <= set(found):
            raise ExtractionError(f"given the quantisation {found!r:.80}, expected its method, or bits and group size")
        importer: type[Importer] | None = Mlx
    else:
        importer = _BY_METHOD.get(str(method))
    if importer is None:
        raise ExtractionError(f"given weights quantised by '{method}', expected one of {', '.join(_BY_METHOD)}")
    with describing("the quantisation"):
        return importer(found)
