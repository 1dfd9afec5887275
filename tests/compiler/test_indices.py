"""Checks of indices through all passes, on a device that is numpy: what is checked, and what is not."""

from __future__ import annotations

import pytest
import torch

from npu_compiler.errors import InputError, UnsupportedOpError
from tests.ops.cases import Case, case, floats, integers
from tests.ops.indexed import GRAPHS, indexed_ir
from tests.support.reference_target import plan_ir


@pytest.mark.parametrize("name", [name for name in GRAPHS if "attention" not in name and "decode" not in name])
def test_a_plan_tells_the_first_index_beyond_its_tensor(name: str) -> None:
    graph = GRAPHS[name]
    planned = plan_ir(indexed_ir(name, torch.float32, torch.int64))
    inputs = {f"x{i}": torch.rand(shape) for i, shape in enumerate(graph.shapes)}
    ids = torch.arange(torch.Size(graph.ids).numel()).reshape(graph.ids)
    planned.run({**inputs, "ids": ids})
    ids.view(-1)[-1] = graph.extent
    last = [size - 1 for size in graph.ids]
    told = f"{graph.named}: given the index {graph.extent} at position {last}, expected"
    with pytest.raises(InputError) as caught:
        planned.run({**inputs, "ids": ids})
    assert str(caught.value).startswith(told)


KNOWN = [
    case("cat.default", [floats(3, 8), floats(2, 8)]),
    case("constant_pad_nd.default", floats(3, 4), (1, 2)),
    case("tril.default", floats(4, 4)),
    case("select.int", floats(3, 4), 0, 1),
]


@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_positions_of_the_op_itself_are_not_checked(known: Case) -> None:
    assert plan_ir(known.ir(torch.float32)).plan.checks == ()


def test_a_dimension_without_elements_has_no_index() -> None:
    with pytest.raises(UnsupportedOpError, match=r"given indices \[3\] into a dimension of no elements"):
        plan_ir(case("embedding.default", floats(0, 4), integers(3)).ir(torch.float32))
