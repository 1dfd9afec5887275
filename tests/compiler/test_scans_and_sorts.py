"""Scans and sorts in models: what fuses with them, how many launches they take, and what they give end to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import npu_compiler
from npu_compiler.errors import InputError
from npu_compiler.frontend.extraction import extract
from npu_runtime import Device, Executor
from tests.support.extraction import Function

TARGETS = ("metal", "cuda")
MASK = (torch.arange(7) < torch.tensor([[3], [7], [1]])).long()
TOKENS = torch.arange(12.0).reshape(3, 4).cos()
CODES = torch.linspace(-2, 2, 40).reshape(5, 8).sin()


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Positions in a batch that is padded on the left, as decoders count them."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)


def experts(x: torch.Tensor) -> torch.Tensor:
    """The weights of two experts of each token, spread over all of them."""
    weights, chosen = torch.topk(torch.softmax(x, -1), 2)
    weights = weights / weights.sum(-1, keepdim=True)
    taken: torch.Tensor = (weights[..., None] * functional.one_hot(chosen, x.shape[-1])).sum(1)
    return taken


def nearest(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The nearest entry of a codebook."""
    return torch.cdist(x, codes).argmin(-1)


def nucleus(x: torch.Tensor) -> torch.Tensor:
    """Which scores are among the likeliest that make up most of the probability."""
    ordered, places = torch.sort(x, descending=True)
    kept = torch.softmax(ordered, -1).cumsum(-1) < 0.8
    return kept.gather(-1, places.argsort(-1))


def similarity(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cosine_similarity(functional.normalize(x), y[:3, :4])


MODELS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "positions": (positions, (MASK,)),
    "nearest": (nearest, (TOKENS, CODES[:, :4].contiguous())),
    "nucleus": (nucleus, (TOKENS,)),
    "similarity": (similarity, (TOKENS, CODES)),
    "bins": (lambda x, edges: torch.bucketize(x, edges.sort().values), (TOKENS, CODES[0])),
    "median": (lambda x: x.median(0).values + x.median(1, keepdim=True).values, (TOKENS,)),
    "loss": (lambda x, y: functional.cross_entropy(x, y.argmax(-1)), (TOKENS, TOKENS.flip(1).contiguous())),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_what_pytorch_gives(name: str) -> None:
    function, inputs = MODELS[name]
    extracted = extract(Function(function), inputs)
    program = npu_compiler.compile(extracted.ir, "metal")
    given = {spec.name: x.numpy() for spec, x in zip(program.input_specs, inputs, strict=True)}
    (result,) = Executor(program, Device("software-metal")).run(given).values()
    expected = function(*inputs).numpy()
    np.testing.assert_allclose(np.asarray(result, expected.dtype), expected, rtol=4e-3, atol=2e-3)


def launches(function: Callable[..., Any], target: str, *inputs: torch.Tensor) -> list[str]:
    plan = npu_compiler.compile(extract(Function(function), inputs).ir, target).main
    return [plan.kernels[call.kernel].entry for call in plan.calls]  # type: ignore[union-attr]


@pytest.mark.parametrize("target", TARGETS)
def test_a_scan_computes_what_it_reads_and_what_follows(target: str) -> None:
    function = lambda x: (x * 2 + 1).cumsum(-1) - 1  # noqa: E731
    assert launches(function, target, torch.zeros(4, 100)) == ["scan"]
    assert launches(function, target, torch.zeros(100, 4).T) == ["scan"]


@pytest.mark.parametrize("target", TARGETS)
def test_blocks_share_a_long_row(target: str) -> None:
    assert launches(lambda x: x.cumsum(-1), target, torch.zeros(1, 100_000)) == ["scan_totals", "scan"]
    assert launches(lambda x: x.cumsum(-1), target, torch.zeros(4000, 400)) == ["scan"]


def test_a_few_of_a_vocabulary_take_two_launches() -> None:
    entries = launches(lambda x: torch.topk(x, 50).indices, "cuda", torch.zeros(1, 151_936))
    assert entries == ["sort_select", "sort"]
    assert launches(lambda x: torch.topk(x * 2, 2).indices, "cuda", torch.zeros(500, 8)) == ["sort"]


def test_whole_rows_are_merged() -> None:
    entries = launches(lambda x: torch.argsort(x), "cuda", torch.zeros(1, 20_000))
    assert entries == ["sort_segment", *["sort_merge"] * 2, "sort_places"]


def test_an_index_of_thousands_is_sorted_before_rows_are_added() -> None:
    def added(count: int) -> list[str]:
        given = torch.zeros(300, 64), torch.zeros(count, dtype=torch.int64), torch.zeros(count, 64)
        return launches(lambda x, i, y: x.index_add(0, i, y), "cuda", *given)

    assert added(2048) == ["scatter_rows"]
    assert added(8192) == ["scatter_sort", "scatter_sorted"]


def test_what_nobody_reads_is_not_scanned() -> None:
    assert launches(lambda x: torch.cummax(x, 1).values, "cuda", torch.zeros(4, 9)) == ["scan"]


def test_a_class_beyond_all_is_named() -> None:
    extracted = extract(Function(functional.cross_entropy), (TOKENS, torch.zeros(3, dtype=torch.int64)))
    program = npu_compiler.compile(extracted.ir, "metal")
    names = [spec.name for spec in program.input_specs]
    given = dict(zip(names, (TOKENS.numpy(), np.array([0, -100, 4])), strict=True))
    with pytest.raises(InputError, match=r"given the index 4 at position \[2"):
        Executor(program, Device("software-metal")).run(given)
