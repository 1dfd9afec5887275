"""What tests of `torch.compile(module, backend="npu")` share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from npu_model.torch_backend import npu

__all__ = ["IN_PYTORCH", "close", "compiled", "layers", "normalised"]

IN_PYTORCH = "a graph runs in PyTorch and not on the device: "


def compiled(function: Any, **options: Any) -> Any:
    """A function or module, compiled by the backend itself, as an entry point that is not installed would give it."""
    return torch.compile(function, backend=npu, **options)


def close(given: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(given, wanted, rtol=1e-2, atol=1e-2)


def layers(width: int = 10) -> nn.Sequential:
    """Two linear layers with their activations, of seeded weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.Sigmoid())


def normalised() -> nn.Sequential:
    """A convolution of three channels with BatchNorm, in training mode."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
