"""Attention whose heads have sinks: scores that take their share of the weights and bring no value."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import npu_compiler
import npu_runtime
from cuda_runtime.nvrtc import architectures
from npu_compiler.errors import MissingDependencyError
from tests.cuda.kernels import check_plan_compiles


class Spelled(torch.nn.Module):
    """Attention with sinks as models spell it out, of heads that may share keys and values."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.linspace(-3.0, 6.0, heads).half().float())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        (batch, heads, rows, _), (_, groups, length, _) = q.shape, k.shape
        keys, values = (
            x[:, :, None].expand(batch, groups, heads // groups, length, -1).reshape(batch, heads, length, -1)
            for x in (k, v)
        )
        scores = torch.matmul(q, keys.transpose(2, 3)) * 0.25 + mask
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(batch, -1, rows, -1)
        logits = torch.cat([scores, sinks], dim=-1)
        logits = logits - logits.max(dim=-1, keepdim=True).values
        weights = torch.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
        return torch.matmul(weights.to(values.dtype), values)


class Sizes(NamedTuple):
    batch: int
    heads: int
    groups: int
    rows: int
    length: int
    size: int = 16


SIZES = [
    Sizes(1, 4, 2, 1, 40),
    Sizes(2, 6, 3, 5, 40),
    Sizes(2, 4, 4, 150, 150),
    Sizes(1, 8, 1, 1, 3000, 64),
    Sizes(1, 8, 2, 300, 300, 64),
    Sizes(1, 2, 1, 9, 2100),
]


def operands(sizes: Sizes) -> tuple[torch.Tensor, ...]:
    """Numbers that half precision has; the first row of the mask is closed everywhere but in the last position."""
    generator = torch.Generator().manual_seed(sizes.rows)
    queries = (sizes.batch, sizes.heads, sizes.rows, sizes.size)
    keys = (sizes.batch, sizes.groups, sizes.length, sizes.size)
    given = [torch.randn(shape, generator=generator).mul(1.5).half().float() for shape in (queries, keys, keys)]
    mask = torch.zeros(1, 1, sizes.rows, sizes.length)
    mask[:, :, 0, :-1] = float("-inf")
    return (*given, mask)


def check(sizes: Sizes, device: str) -> None:
    model, given = Spelled(sizes.heads).eval(), operands(sizes)
    extraction = npu_compiler.extract(model, given)
    program = npu_compiler.compile(extraction, target=npu_runtime.Device(device).target)
    found: Any = npu_runtime.load(program, extraction.weights, device=device)(*given)
    expected = model.double()(*(each.double() for each in given))
    torch.testing.assert_close(torch.as_tensor(found).double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[1], SIZES[2], SIZES[5]], ids=str)
def test_equals_torch(sizes: Sizes) -> None:
    check(sizes, "software-metal")


@pytest.mark.parametrize("target", ["metal", "cuda"])
def test_scores_are_not_stored(target: str) -> None:
    extraction = npu_compiler.extract(Spelled(6).eval(), operands(SIZES[1]))
    entries = {kernel.entry for kernel in npu_compiler.compile(extraction, target=target).main.kernels}
    assert {name.partition("_")[0] for name in entries} <= {"attention", "mask"}


@pytest.mark.parametrize("architecture", [70, 80, 90])
def test_kernels_for_cuda_compile(architecture: int) -> None:
    try:
        if architecture not in architectures():
            pytest.skip(f"this NVRTC does not compile for {architecture}")
    except MissingDependencyError as error:
        pytest.skip(str(error))
    for sizes in SIZES[:5]:
        extraction = npu_compiler.extract(Spelled(sizes.heads).eval(), operands(sizes))
        check_plan_compiles(npu_compiler.compile(extraction, target="cuda").main, architecture)
