"""ResNets for these tests."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import npu_compiler
from npu_cli.extras import import_torchvision
from npu_compiler.compiled_program import CompiledProgram

__all__ = ["compiled_resnet"]


@cache
def compiled_resnet(name: str, batch: int) -> CompiledProgram:
    """A ResNet for images of 224 x 224, compiled for CUDA."""
    model: Any = import_torchvision().models.get_model(name, weights=None).eval()
    extraction = npu_compiler.extract(model, (torch.zeros(batch, 3, 224, 224),), model_name=name)
    return npu_compiler.compile(extraction.ir, target="cuda")
