"""From `torch.nn.Module` to IR; torch is imported only once `extract` is called."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_compiler.artifact.describe import format_bytes
from npu_compiler.errors import ExtractionError, MissingDependencyError

if TYPE_CHECKING:
    import torch

__all__ = ["Extraction", "extract"]


@dataclass(frozen=True)
class Extraction:
    """What `extract` made.

    Attributes:
        ir: The IR: a mapping that JSON can hold, in the schema of pytorch-ir.
        weights: Every parameter, buffer and constant by the name the IR uses; the model's own tensors, not copies.
        ir_path: The IR's file, or None where no path was given.
        weights_path: The safetensors file beside it, or None where no path was given.
    """

    ir: dict[str, Any]
    weights: Mapping[str, torch.Tensor] = field(repr=False)
    ir_path: Path | None = None
    weights_path: Path | None = None

    def __repr__(self) -> str:
        nbytes = sum(tensor.nbytes for tensor in self.weights.values())
        written = "" if self.ir_path is None else f", in '{self.ir_path}'"
        return (
            f"Extraction('{self.ir['model_name']}': {len(self.ir['nodes'])} nodes, {len(self.weights)} weights of "
            f"{format_bytes(nbytes)}{written})"
        )


def extract(
    model: torch.nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | torch.Tensor,
    path: str | os.PathLike[str] | None = None,
    *,
    model_name: str | None = None,
) -> Extraction:
    """Turns a model into IR, with its weights beside it.

    The model is exported from its real tensors, under `torch.no_grad()`. Nothing is run but the export itself.

    Args:
        model: A module in eval mode, with values in its parameters.
        example_inputs: Positional arguments as a tuple, keyword arguments as a mapping, or a single tensor. Their
            shapes and dtypes are those of the compiled program; their values do not matter.
        path: Where to write the IR, such as ``model.json``; ``model.safetensors`` is written beside it. Both appear
            whole or not at all. Symbolic links are followed. Without a path nothing is written.
        model_name: Name in the IR; the model's class if None.

    Raises:
        MissingDependencyError: torch or pytorch-ir is not installed.
        ExtractionError: The model is in training mode, has no values, cannot be exported, changes its own buffers, or
            has a shape that is known only when it runs; or the path is that of the weights, no regular file, or cannot
            be written.
    """
    for module in ("torch", "torch_ir"):
        if find_spec(module) is None:
            raise MissingDependencyError(
                f"extracting a model needs the package '{module}', which is not installed; "
                "install the extra that has it: pip install 'npu-compiler[torch]'"
            )
    for what, given in (("path", path), ("model_name", model_name)):
        if given is not None and not (isinstance(given, str) or (what == "path" and isinstance(given, os.PathLike))):
            raise ExtractionError(f"given a {type(given).__name__} as {what}, expected text; leave it out for none")
    from npu_compiler.frontend.exporting import export
    from npu_compiler.frontend.to_ir import program_to_ir, program_weights
    from npu_compiler.frontend.weight_file import extraction_paths, write_extraction

    paths = None if path is None else extraction_paths(path)
    exported = export(model, example_inputs)
    weights, canonical = program_weights(exported)
    ir = program_to_ir(exported, canonical, model_name or type(model).__name__)
    if paths is None:
        return Extraction(ir, weights)
    ir_path, weights_path = paths
    write_extraction(ir, ir_path, weights, weights_path)
    return Extraction(ir, weights, ir_path, weights_path)
