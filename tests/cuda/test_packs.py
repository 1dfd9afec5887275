"""What is read and stored 16 bytes at a time, seen in the kernels' text."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import npu_compiler
from tests.ops.cases import case, floats, integers
from tests.support.ir_builder import IRBuilder


def _kernels(module: torch.nn.Module, *inputs: torch.Tensor) -> dict[str, str]:
    ir = npu_compiler.extract(module.eval(), inputs, model_name="packs").ir
    return {kernel.entry: kernel.text for kernel in npu_compiler.compile(ir, target="cuda").main.kernels}


class _Of(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.function(*tensors)


def _turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1) * 2


def _written(cache: torch.Tensor, position: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return cache.index_copy(1, position, x + 1)


@pytest.mark.parametrize(("width", "size"), [(64, 8), (24, 4), (6, None)])
def test_sides_of_a_condition_are_read_in_packs_that_its_border_does_not_cut(width: int, size: int | None) -> None:
    (text,) = _kernels(_Of(_turned), torch.zeros(3, 5, width)).values()
    guarded = re.findall(r"\? load_pack<(\d)>", text)
    assert guarded == ([] if size is None else [str(size)] * 2)


def test_scatters_store_packs_where_their_index_allows() -> None:
    inputs = torch.zeros(2, 16, 64), torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3, 64)
    texts = _kernels(_Of(_written), *inputs)
    assert any("load_pack<8>" in text and "int(v" in text and "* 64;" in text for text in texts.values())


def test_means_over_images_take_eight_channels_a_thread() -> None:
    texts = _kernels(torch.nn.AdaptiveAvgPool2d(1), torch.zeros(2, 32, 7, 7))
    assert "load_pack<8>" in texts["columns"]
    assert (
        "load_pack"
        not in re.split(r"compute_rows", _kernels(torch.nn.AdaptiveAvgPool2d(1), torch.zeros(2, 3, 7, 7))["columns"])[1]
    )


@pytest.mark.parametrize("width", [64, 12, 7])
def test_rows_that_an_index_names_are_read_in_packs(width: int) -> None:
    size = {64: 8, 12: 4}.get(width)
    ids = integers(9, low=0, high=50)
    for call in (
        case("embedding.default", floats(50, width), ids),
        case("index.Tensor", floats(3, 50, width), [None, ids]),
    ):
        text = npu_compiler.compile(call.ir(torch.float32), "cuda").main.kernels[0].text
        assert (f"load_pack<{size}>(e1" in text) == (size is not None)


def test_rows_that_are_combined_are_computed_where_they_are_read() -> None:
    builder = IRBuilder()
    rows, weights = builder.input("rows", (2048, 512)), builder.input("weights", (2048, 1))
    index = builder.input("index", (2048,), torch.int64)
    base = builder.call("aten.full.default", [2048, 512], 0.0, device=torch.device("meta"))
    scaled = builder.call("aten.mul.Tensor", rows, weights)
    program = npu_compiler.compile(
        builder.build(builder.call("aten.index_add.default", base, 0, index, scaled)), "cuda"
    )
    assert len(program.main.calls) == 1
    (kernel,) = program.main.kernels
    assert re.search(r"load_pack<\d>\(fe0", kernel.text)
    assert "checked_index" in kernel.text
