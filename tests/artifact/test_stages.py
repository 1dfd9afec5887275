"""Recipes of expressions, as a stranger may write them: wrong numbers, or refused with a ProgramFormatError."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from npu_compiler.artifact.codec import decode, encode
from npu_compiler.artifact.recipes import EXPRESSIONS, WeightInput, WeightRecipe
from npu_compiler.artifact.stages import Instruction, Stage, check_stages, run_stages
from npu_compiler.dtypes import ALL, BOOL, FLOAT8_E4M3FN, FLOAT32, INT64, DType
from npu_compiler.errors import NPUError, ProgramFormatError, WeightError
from npu_compiler.tensor.expr import FUNCTIONS
from npu_compiler.tensor.layout import BufferSpec, dense


def load(tensor: int, *view: int, args: tuple[int, ...] = (), stride: int = 0, dtype: DType = FLOAT32) -> Instruction:
    return Instruction("load", dtype, args, numbers=(tensor, stride, *view))


SUMS = Stage(
    (2, 1),
    FLOAT32,
    (
        load(0, 0, 2, 3, 3, 1),
        Instruction("slot", FLOAT32, numbers=(0,)),
        Instruction("slot", FLOAT32, numbers=(1,)),
        Instruction("call", FLOAT32, (1, 2), "add"),
        Instruction("const", FLOAT32),
        Instruction("reduce", FLOAT32, (0, 3, 4), numbers=(3, 0)),
    ),
)
ROWS = Stage(
    (3, 3),
    FLOAT32,
    (
        load(1, 0, 3, 1, 1, 0, dtype=INT64),
        Instruction("iota", INT64, numbers=(0, 3, 1, 1, 0)),
        Instruction("checked", INT64, (0, 1), numbers=(3, 2, 0)),
        load(0, 0, 3, 3, 0, 1, args=(2,), stride=3),
        load(2, 0, 3, 3, 0, 0),
        Instruction("call", FLOAT32, (3, 4), "mul"),
    ),
)
TENSOR, INDEX = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, 0, 1])


def test_stages_are_computed_one_from_another() -> None:
    result = run_stages("w", [SUMS, ROWS], [TENSOR, INDEX])
    np.testing.assert_array_equal(result, TENSOR[INDEX] * TENSOR[0].sum())


def test_they_are_written_and_read() -> None:
    spec = BufferSpec("w", FLOAT32, FLOAT32, dense((3, 3)))
    inputs = (WeightInput("t", (2, 3), "float32"), WeightInput("i", (3,), "int64"))
    literal = Stage((1,), FLOAT32, (), np.float32(2).tobytes())
    recipe = WeightRecipe(spec, inputs, EXPRESSIONS, stages=(SUMS, ROWS, literal, replace(ROWS)))
    assert decode(WeightRecipe, encode(recipe)) == recipe
    assert not recipe.is_plain
    assert recipe.runs is None
    np.testing.assert_array_equal(recipe.compute([TENSOR, INDEX]), TENSOR[INDEX] * TENSOR[0].sum())


def test_an_index_beyond_its_tensor_is_a_mistake_of_the_weights() -> None:
    with pytest.raises(WeightError, match="'w': given the index 2 in a tensor of the weight file"):
        run_stages("w", [SUMS, ROWS], [TENSOR, np.array([0, 2, 1])])


def test_a_result_of_another_shape_is_refused() -> None:
    recipe = WeightRecipe(BufferSpec("w", FLOAT32, FLOAT32, dense((9,))), (), EXPRESSIONS, stages=(SUMS, ROWS))
    with pytest.raises(ProgramFormatError, match="its recipe gives shape"):
        replace(recipe, inputs=(WeightInput("t", (2, 3), "float32"),) * 2).compute([TENSOR, INDEX])


NUMBERS = Stage((1 << 26,), INT64, (Instruction("iota", INT64, numbers=(0, 1 << 26, 1)),))


def _with(place: int, **fields: Any) -> Stage:
    code = list(ROWS.code)
    code[place] = replace(code[place], **fields)
    return replace(ROWS, code=tuple(code))


HOSTILE = {
    "none": [],
    "too many": [SUMS] * 10_000,
    "no instruction and no data": [Stage((2,), FLOAT32, ())],
    "a constant of negative sizes": [Stage((-2, -1), FLOAT32, (), bytes(8))],
    "a constant of many dimensions": [Stage((1,) * 80, FLOAT32, (), bytes(4))],
    "tensors that are large together": [NUMBERS] * 5,
    "data of another length": [Stage((2,), FLOAT32, (), b"1234")],
    "too many instructions": [replace(SUMS, code=SUMS.code[:1] * 4000)],
    "an unknown instruction": [SUMS, _with(5, kind="eval")],
    "an unknown function": [SUMS, _with(5, fn="__import__")],
    "another number of operands": [SUMS, _with(5, args=(3, 4, 4))],
    "a function that would write": [SUMS, _with(5, args=(3, 4, 3), fn="add")],
    "an operand that comes later": [SUMS, _with(2, args=(5, 1))],
    "a negative operand": [SUMS, _with(5, args=(-1, 4))],
    "a tensor that is not there": [SUMS, _with(4, numbers=(9, 0, 0, 3, 3, 0, 0))],
    "a negative tensor": [SUMS, _with(4, numbers=(-1, 0, 0, 3, 3, 0, 0))],
    "the stage itself": [SUMS, _with(4, numbers=(3, 0, 0, 3, 3, 0, 0))],
    "a view without strides": [SUMS, _with(4, numbers=(0, 0, 0, 3))],
    "a view of negative size": [SUMS, _with(4, numbers=(0, 0, 0, -3, 3, 0, 0))],
    "a view of nothing": [SUMS, _with(4, numbers=())],
    "huge strides": [SUMS, _with(4, numbers=(0, 0, 0, 3, 3, 1 << 62, 1))],
    "a huge shape": [SUMS, replace(ROWS, shape=(1 << 40, 1 << 40))],
    "a shape that is large": [SUMS, replace(ROWS, shape=(1 << 14, 1 << 14))],
    "a negative shape": [SUMS, replace(ROWS, shape=(-1, 3))],
    "many dimensions": [SUMS, replace(ROWS, shape=(1,) * 40)],
    "long rows": [replace(SUMS, code=(*SUMS.code[:-1], replace(SUMS.code[-1], numbers=(1 << 40, 0))))],
    "a state of another number": [replace(SUMS, code=(*SUMS.code[:-1], replace(SUMS.code[-1], numbers=(3, 4))))],
    "half a reduction": [replace(SUMS, code=(*SUMS.code[:-1], replace(SUMS.code[-1], args=(0, 3))))],
    "a reduction without an identity": [replace(SUMS, code=(*SUMS.code[:-1], replace(SUMS.code[-1], args=(0, 3, 0))))],
    "a slot outside of a reduction": [Stage((2,), FLOAT32, SUMS.code[:2])],
    "an index that is no integer": [SUMS, _with(3, args=(4,), kind="load")],
    "a check of a negative size": [SUMS, _with(2, numbers=(3, -2, 0))],
    "a check that gives anything": [SUMS, _with(2, numbers=(3, 2, 99))],
    "codes": [replace(SUMS, dtype=FLOAT8_E4M3FN)],
    "a number beyond its type": [Stage((1,), BOOL, (Instruction("const", INT64, numbers=(1 << 70,)),))],
}


@pytest.mark.parametrize("stages", HOSTILE.values(), ids=HOSTILE)
def test_what_no_compiler_wrote_is_refused(stages: list[Stage]) -> None:
    with pytest.raises(ProgramFormatError, match="the file is damaged, compile the model again"):
        run_stages("w", stages, [TENSOR, INDEX])


def test_it_is_refused_when_the_program_is_read() -> None:
    with pytest.raises(ProgramFormatError):
        check_stages("w", HOSTILE["a huge shape"], 2)


@given(data=st.data())
@settings(
    max_examples=300, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_random_stages_give_numbers_or_are_refused(data: st.DataObject) -> None:
    small = st.integers(-2, 4)
    kinds = st.sampled_from(["const", "load", "iota", "call", "reduce", "checked", "slot"])
    line = st.builds(
        Instruction,
        kinds,
        st.sampled_from(list(ALL)),
        st.lists(st.integers(-1, 6), max_size=3).map(tuple),
        st.sampled_from(["cast", *FUNCTIONS]),
        st.lists(small, max_size=7).map(tuple),
        st.floats(),
    )
    stage = st.builds(
        Stage,
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
        st.sampled_from(list(ALL)),
        st.lists(st.one_of(line, st.sampled_from([*SUMS.code, *ROWS.code])), max_size=8).map(tuple),
    )
    stages = data.draw(st.lists(stage, min_size=1, max_size=3))
    with suppress(NPUError):
        run_stages("w", [SUMS, *stages], [TENSOR, INDEX])
