"""Norms and softmax however they are spelled: each is one kernel on every target, and right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import npu_compiler
from tests.support.extraction import Function
from tests.support.reference_target import plan_ir

SHAPE = (2, 3, 8)
Tensor = torch.Tensor


def wide(x: Tensor) -> Tensor:
    return x.expand(SHAPE)


def softmax(x: Tensor, along: Callable[[Tensor], Tensor], keepdim: bool, dim: int = -1) -> Tensor:
    shifted = torch.exp(x - along(x.amax(dim, keepdim=keepdim)))
    return shifted / along(shifted.sum(dim, keepdim=keepdim))


def log_softmax(x: Tensor, w: Tensor) -> Tensor:
    shifted = x - wide(x.amax(-1, keepdim=True))
    return shifted - wide(torch.log(torch.exp(shifted).sum([-1], keepdim=True)))


def norm_of_shared_mean(x: Tensor, w: Tensor) -> Tensor:
    mean = x.mean((2,), keepdim=True)
    return (x - wide(mean)) / torch.sqrt((x - wide(mean)).pow(2).mean([-1], keepdim=True) + 1e-5) * w


def norm_of_centred(x: Tensor, w: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * w


def norm_of_squeezed(x: Tensor, w: Tensor) -> Tensor:
    mean = x.sum(2).div(8).unsqueeze(-1)
    variance = (x - mean).pow(2).sum(-1) / 8
    return (x - wide(mean)) * wide(torch.rsqrt(variance + 1e-5).unsqueeze(-1)) * w


def norm_of_squares(x: Tensor, w: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt((x * x).mean(-1, keepdim=True) - mean * mean + 1e-5) * w


def log_sum_exp(x: Tensor, w: Tensor) -> Tensor:
    largest = x.amax(-1)
    return torch.log(torch.exp(x - largest.unsqueeze(-1)).sum(-1)) + largest


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rms, expanded": lambda x, w: w * (x * wide(torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))),
    "rms, list of dims": lambda x, w: w * (x * wide(torch.rsqrt((x * x).mean([2], keepdim=True) + 1e-6))),
    "rms, unsqueezed": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(2) + 1e-6).unsqueeze(-1)),
    "rms, unsqueezed and expanded": lambda x, w: w * (x * wide(torch.rsqrt(x.pow(2).mean(-1) + 1e-6).unsqueeze(2))),
    "rms, sum, quotient and root": lambda x, w: w * (x / torch.sqrt((x * x).sum(-1, keepdim=True) / 8 + 1e-6)),
    "rms, reshaped": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6).reshape(2, 3, 1)),
    "rms, other rows": lambda x, w: w * (x * wide(torch.rsqrt(x.pow(2).mean(-1).view(6, 1) + 1e-6).view(2, 3, 1))),
    "rms, as another": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6).expand_as(x)),
    "softmax, expanded": lambda x, w: softmax(x, wide, True),
    "softmax, unsqueezed": lambda x, w: softmax(x, lambda s: s.unsqueeze(-1), False),
    "softmax, unsqueezed and expanded": lambda x, w: softmax(x, lambda s: wide(s.unsqueeze(2)), False, 2),
    "softmax, masked": lambda x, w: softmax(x.masked_fill(x > 0.5, -1e4), wide, True),
    "log_softmax": log_softmax,
    "log_sum_exp": log_sum_exp,
    "layer norm, shared mean": norm_of_shared_mean,
    "layer norm, centred": norm_of_centred,
    "layer norm, squeezed": norm_of_squeezed,
    "layer norm, squares": norm_of_squares,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_however_it_is_spelled_it_is_one_kernel(name: str) -> None:
    function = SPELLINGS[name]
    x, w = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)), torch.linspace(0.5, 1.5, 8)
    ir = npu_compiler.extract(Function(function), (x, w), model_name="spelled").ir
    for target in ("metal", "cuda"):
        assert len(npu_compiler.compile(ir, target=target).main.steps) == 1
    planned = plan_ir(ir)
    assert len(planned.groups) == 1
    names = [item["name"] for item in ir["graph_inputs"]]
    given = dict(zip(names, (x.double(), w.double()), strict=False))
    (result,) = planned.run(given)
    np.testing.assert_allclose(result, function(x.double(), w.double()).numpy(), rtol=1e-9, atol=1e-12)
