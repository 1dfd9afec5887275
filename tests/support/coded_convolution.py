"""What a convolution of codes means, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.coded_images import Coded

__all__ = ["exact_convolution"]


def exact_convolution(coded: Coded, image: Tensor) -> Tensor:
    """The convolution of an image, whose numbers are exactly those of its codes, in float64."""
    weight = (coded.codes.double() - coded.zeros.reshape(-1, 1, 1, 1)) * coded.scales.double().reshape(-1, 1, 1, 1)
    bias = None if coded.bias is None else coded.bias.detach().double()
    assert coded.geometry is not None
    return torch.nn.functional.conv2d(image.double(), weight, bias, *coded.geometry)
