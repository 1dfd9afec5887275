"""Several functions in one program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npu_compiler
from npu_compiler.errors import CompileError


def linear_ir(inputs: int, rows: int) -> dict[str, Any]:
    """A linear of 6 outputs, whose weight is called ``weight``, for so many rows."""
    model = torch.nn.Linear(inputs, 6).eval()
    return dict(npu_compiler.extract(model, (torch.zeros(rows, inputs),)).ir)


def test_functions_share_their_weights() -> None:
    program = npu_compiler.compile({"one": linear_ir(4, 1), "many": linear_ir(4, 9)})
    assert list(program.functions) == ["one", "many"]
    assert sorted(recipe.inputs[0].name for recipe in program.recipes) == ["bias", "weight"]


def test_weights_that_differ_under_one_name_are_refused() -> None:
    with pytest.raises(
        CompileError, match=r"'weight' is float32\[6, 4\] in function 'one' and float32\[6, 5\] in 'many'"
    ):
        npu_compiler.compile({"one": linear_ir(4, 1), "many": linear_ir(5, 9)})


def test_something_else_than_irs_is_refused() -> None:
    with pytest.raises(CompileError, match="expected an IR or a mapping of names to IRs"):
        npu_compiler.compile({"one": 1})
