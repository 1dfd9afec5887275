"""Codes of maxima: when they are maxima of codes."""

from __future__ import annotations

import pytest
import torch
from torch.ao.quantization.fx import _decomposed

from npu_compiler.frontend.ir_reader import read_graph
from npu_compiler.graph.coded_pooling import pool_codes
from tests.support.ir_builder import IRBuilder

assert _decomposed  # which defines these operators

ROUNDING = "quantized_decomposed.quantize_per_tensor.default"
NUMBERS = "quantized_decomposed.dequantize_per_tensor.default"


@pytest.mark.parametrize(
    ("scale", "reads_twice", "turns"), [(0.1, False, True), (-0.1, False, False), (0.1, True, False)]
)
def test_rounding_comes_first_where_it_keeps_the_order_and_alone_reads(
    scale: float, reads_twice: bool, turns: bool
) -> None:
    builder = IRBuilder()
    image = builder.call("aten.relu.default", builder.input("x", (1, 4, 8, 8)))
    pooled = builder.call("aten.max_pool2d.default", image, [2, 2], [2, 2])
    codes = builder.call(ROUNDING, pooled, scale, 0, -128, 127, torch.int8)
    results = [builder.call(NUMBERS, codes, scale, 0, -128, 127, torch.int8), *([pooled] if reads_twice else [])]
    graph = pool_codes(read_graph(builder.build(*results)))
    ops = [node.op.rpartition(".default")[0].rpartition(".")[2] for node in graph.nodes]
    pooling, rounding = ("max_pool_codes", "quantize_per_tensor") if turns else ("max_pool2d", "quantize_per_tensor")
    order = [rounding, pooling] if turns else [pooling, rounding]
    assert ops == ["relu", *order, "dequantize_per_tensor"]
