"""Writes an IR and its weights: whole or not at all, and one tensor at a time."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from npu_compiler.artifact.output_file import check_output, replacing, same_file, write_file
from npu_compiler.dtypes import dtype
from npu_compiler.errors import ExtractionError, IRError

__all__ = ["extraction_paths", "write_extraction", "write_json", "write_weights"]

_ALIGNMENT = 8  # of the header, so that tensors can be used where they lie in the mapped file


def write_extraction(
    ir: Mapping[str, Any], ir_path: Path, weights: Mapping[str, torch.Tensor], weights_path: Path
) -> None:
    """Writes the IR as JSON and the weights as safetensors. The IR appears last: where it is, its weights are.

    Raises:
        ExtractionError: A path is no regular file, the disk is full or may not be written, or safetensors has no such
            dtype.
    """
    write_weights(weights_path, weights)
    write_json(ir_path, ir)


def extraction_paths(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Where the IR goes, and the weights beside it.

    Raises:
        ExtractionError: The two are one file, or one of them is no regular file or in a folder that does not exist.
    """
    ir_path = Path(path)
    check_output(ir_path, failure=ExtractionError)
    weights_path = ir_path.with_suffix(".safetensors")
    if same_file(ir_path, weights_path):
        raise ExtractionError(f"given '{path}' for the IR, which is where its weights go; give a path ending in .json")
    check_output(weights_path, failure=ExtractionError)
    return ir_path, weights_path


def write_weights(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors as safetensors, one after another, so that none is held twice; raises as `write_extraction`."""
    with replacing(path, failure=ExtractionError) as file:
        _write_safetensors(file, weights)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON; raises as `write_extraction`."""
    write_file(path, json.dumps(content, indent=1).encode(), failure=ExtractionError)


def _write_safetensors(file: BinaryIO, weights: Mapping[str, torch.Tensor]) -> None:
    """Format: https://github.com/huggingface/safetensors#format (length of the header, header as JSON, data)."""
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name, tensor in weights.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _code(name, tensor), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in weights.values():
        flat = tensor.cpu().contiguous().reshape(-1)
        file.write(flat.view(torch.uint8).numpy().data)


def _code(name: str, tensor: torch.Tensor) -> str:
    try:
        return dtype(str(tensor.dtype)).safetensors
    except IRError as error:
        raise ExtractionError(f"weight '{name}': {error}; convert the model with model.to(dtype)") from error
