"""The rewriting engine: what a rule finds, and that a near miss says what was in the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import npu_compiler
from npu_compiler.frontend.ir_reader import read_graph
from npu_compiler.graph.attention_sinks import attention_beside_sinks
from npu_compiler.graph.fusion_patterns import attention, attention_with_soft_cap, repeated_heads
from npu_compiler.graph.graph_optimizer import normed_convolution, optimize
from npu_compiler.graph.linear_spelling import linear_of_rows, product_of_turned
from npu_compiler.graph.rewrite import PatternOps
from npu_compiler.graph.windowed_attention import attention_of_multiples, repeated_masks, windowed_attention
from npu_compiler.ir import IRGraph
from npu_compiler.ops.registry import terms
from tests.support.ir_builder import IRBuilder, Value
from tests.support.reference_target import plan_ir


def notes(builder: IRBuilder, *outputs: Value) -> tuple[str, ...]:
    return optimize(read_graph(builder.build(*outputs))).notes


def ops(graph: IRGraph) -> list[str]:
    return [node.op.split(".")[1] for node in graph.nodes]


class Attention:
    """Attention spelled out, ``softmax(q @ k.T / scale) @ v``; a tuple as scale is the shape of a tensor."""

    def __init__(self, scale: Any = 2.0, shape: tuple[int, ...] = (1, 2, 4, 8)) -> None:
        self.builder = IRBuilder()
        call = self.builder.call
        q, k, v = (self.builder.input(name, shape) for name in "qkv")
        rank = len(shape)
        scores = call("aten.matmul.default", q, call("aten.transpose.int", k, rank - 2, rank - 1), name="scores")
        if isinstance(scale, tuple):
            scaled = call("aten.mul.Tensor", scores, self.builder.input("scale", scale), name="scaled")
        else:
            scaled = call("aten.div.Tensor", scores, scale, name="scaled")
        self.weights = call("aten.softmax.int", scaled, -1, name="weights")
        self.result = call("aten.matmul.default", self.weights, v, name="result")


def test_attention_needs_no_note() -> None:
    form = Attention()
    graph = optimize(read_graph(form.builder.build(form.result)))
    assert ops(graph) == ["scaled_dot_product_attention"]
    assert not graph.notes


def test_weights_of_attention_that_somebody_reads_are_named() -> None:
    form = Attention()
    (note,) = notes(form.builder, form.result, form.weights)
    assert note == "'result' is not rewritten as attention by one kernel: 'weights' is an output"


def test_a_scale_that_varies_along_the_keys_is_named() -> None:
    form = Attention((2, 1, 4))
    (note,) = notes(form.builder, form.result)
    assert "its scale 'scale' is a tensor [2, 1, 4] of float32, expected a number, or one of float32 for each" in note


def test_heads_of_three_dimensions_are_named() -> None:
    form = Attention(shape=(2, 4, 8))
    (note,) = notes(form.builder, form.result)
    assert "[2, 4, 8], [2, 4, 8], [2, 4, 8], expected four dimensions" in note


def _normed(statistics: str = "weight") -> tuple[IRBuilder, Value, Value]:
    builder = IRBuilder()
    x = builder.input("x", (1, 3, 5, 5))
    convolution = builder.call("aten.conv2d.default", x, builder.weight("w", (4, 3, 3, 3)), name="conv")
    given = [getattr(builder, statistics)(name, (4,)) for name in ("gain", "shift", "average", "variance")]
    return (
        builder,
        convolution,
        builder.call("aten.batch_norm.default", convolution, *given, False, 0.1, 1e-5, True, name="bn"),
    )


def test_a_convolution_that_somebody_else_reads_is_named_in_the_description() -> None:
    builder, convolution, normed = _normed()
    program = npu_compiler.compile(builder.build(normed, convolution))
    reason = "'bn' is not rewritten as a convolution with the BatchNorm in its weights: 'conv' is an output"
    assert program.main.notes == (reason,)
    assert reason in program.describe()


def test_statistics_that_are_no_weights_are_named() -> None:
    builder, _, normed = _normed("input")
    (note,) = notes(builder, normed)
    assert "'gain' is no tensor of the weight file" in note


def test_a_weight_that_keeps_a_linear_from_others_is_named() -> None:
    builder = IRBuilder()
    x, shared = builder.input("x", (4, 8)), builder.weight("shared", (8, 8))
    first, second, third = (
        builder.call("aten.linear.default", x, weight, name=name)
        for name, weight in (
            ("first", builder.weight("one", (8, 8))), ("second", builder.weight("two", (8, 8))), ("third", shared),
        )
    )  # fmt: skip
    again = builder.call("aten.linear.default", first, shared, name="again")
    graph = optimize(read_graph(builder.build(second, third, again)))
    assert graph.notes == (
        "'third' is not rewritten as one product with others of its input: 'p_shared' is also read by 'again'",
    )
    assert ops(graph).count("linear") == 3


def test_shared_parts_of_a_pattern_stay_for_their_other_readers() -> None:
    """A transposed weight that is also an output: the product becomes a linear all the same."""
    builder = IRBuilder()
    x, weight = builder.input("x", (4, 8)), builder.weight("w", (6, 8))
    turned = builder.call("aten.t.default", weight)
    product = builder.call("aten.mm.default", x, turned, name="product")
    ir = builder.build(product, turned)
    graph = optimize(read_graph(ir))
    assert sorted(ops(graph)) == ["linear", "t"]
    assert not graph.notes
    values = {"x": torch.rand(4, 8), "w": torch.rand(6, 8)}
    result, transposed = plan_ir(ir).run({"x": values["x"]}, {"w": values["w"]})
    np.testing.assert_allclose(result, values["x"] @ values["w"].T, rtol=1e-5)
    np.testing.assert_allclose(transposed, values["w"].T, rtol=1e-6)


def test_equations_are_written_with_terms_of_ops_alone() -> None:
    assert {"attention", "batch_norm", "linear", "matmul", "reshape"} <= set(terms())
    with pytest.raises(AttributeError, match=r"equations know add, .* not 'conv3d'"):
        PatternOps().conv3d()


# ---- each rule against its own equation


class TorchOps:
    """The namespace in which an equation computes. It takes the shapes of reshapes and expansions in turn."""

    def __init__(self, shapes: Sequence[Sequence[int]] = ()) -> None:
        self._shapes = iter(shapes)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)  # matmul, mm, mul, div, add

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def transpose(self, x: torch.Tensor) -> torch.Tensor:
        return x.mT

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def addmm(self, added: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return added + x @ y

    def convolution(self, *operands: Any) -> torch.Tensor:
        return F.conv2d(*operands)

    def batch_norm(self, x: torch.Tensor, gain: Any, shift: Any, centre: Any, variance: Any) -> torch.Tensor:
        return F.batch_norm(x, centre, variance, gain, shift)

    def attention(self, *operands: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(*operands)

    def longer_rows(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, y], -1)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return x.amax(-1, keepdim=True)

    def all_but_last(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., :-1]

    def reshape(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(next(self._shapes))

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(next(self._shapes))


class IROps:
    """The namespace in which an equation writes the graph that it is looked for in."""

    def __init__(self, builder: IRBuilder, shapes: Sequence[Sequence[int]] = ()) -> None:
        self._builder, self._shapes = builder, iter(shapes)

    def shared(self, x: Value) -> Value:
        return x

    def longer_rows(self, x: Value, y: Value) -> Value:
        return self._builder.call("aten.cat.default", [x, y], -1)

    def __getattr__(self, name: str) -> Callable[..., Value]:
        op, rest = {
            "matmul": ("matmul.default", ()), "mm": ("mm.default", ()), "addmm": ("addmm.default", ()),
            "mul": ("mul.Tensor", ()), "div": ("div.Tensor", ()), "add": ("add.Tensor", ()),
            "transpose": ("transpose.int", (-2, -1)), "softmax": ("softmax.int", (-1,)),
            "cast": ("to.dtype", (torch.float32,)), "linear": ("linear.default", ()),
            "convolution": ("conv2d.default", ()), "batch_norm": ("batch_norm.default", (False, 0.1, 1e-5, True)),
            "attention": ("scaled_dot_product_attention.default", ()),
            "tanh": ("tanh.default", ()), "sub": ("sub.Tensor", ()), "largest": ("amax.default", ((-1,), True)),
            "all_but_last": ("slice.Tensor", (-1, 0, -1)),
            "reshape": ("reshape.default", None), "expand": ("expand.default", None),
        }[name]  # fmt: skip
        return lambda *operands: self._builder.call(
            f"aten.{op}", *operands, *((list(next(self._shapes)),) if rest is None else rest)
        )


class Given(NamedTuple):
    """The shape of a weight; other operands are inputs."""

    shape: tuple[int, ...]


HEADS, KEYS = (1, 4, 3, 8), (1, 2, 5, 8)
WINDOWS = ((6, 2, 4, 8), (6, 2, 5, 8), (6, 2, 5, 4), (2, 1, 1), (1, 2, 4, 5), (1, 2, 1, 4, 5), (2, 1, 4, 5))
WINDOWED_FORM = {"scaled": "divided", "biased": True, "twice": True, "cast": False}
VIEWED = [(3, 2, 2, 4, 5), (6, 2, 4, 5)]
REPEATED = [(1, 2, 1, 5, 8), (1, 2, 2, 5, 8), (1, 4, 5, 8)] * 2
Equation = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Sequence[Sequence[int]], int]
EQUATIONS: dict[str, Equation] = {
    **{
        f"attention {form}": (attention, (HEADS, (1, 4, 5, 8), (1, 4, 5, 8), 1.5, (3, 5)), form, (), 1)
        for form in (
            {"scaled": "multiplied", "masked": True, "cast": False},
            {"scaled": "divided", "masked": False, "cast": True},
        )
    },
    **{
        f"capped attention {form}": (
            attention_with_soft_cap,
            (HEADS, (1, 4, 5, 8), (1, 4, 5, 8), 1.5, 0.7, (3, 5)),
            form,
            (),
            1,
        )
        for form in (
            {"scaled": "multiplied", "masked": True, "cast": True},
            {"scaled": "", "masked": False, "cast": False},
        )
    },
    **{
        f"attention with sinks {form}": (
            attention_beside_sinks,
            (HEADS, (1, 4, 5, 8), (1, 4, 5, 8), 1.5, (3, 5), Given((4,))),
            form,
            [(1, 4, 1, 1), (1, 4, 3, 1)],
            1,
        )
        for form in (
            {"scaled": "multiplied", "masked": True, "expanded": True, "shifted": True, "cast": True},
            {"scaled": "", "masked": False, "expanded": True, "shifted": False, "cast": False},
        )
    },
    "attention with a scale of each head": (
        attention,
        (HEADS, (1, 4, 5, 8), (1, 4, 5, 8), (4, 1, 1), (3, 5)),
        {"scaled": "divided", "masked": True, "cast": False},
        (),
        2,
    ),
    "windows": (windowed_attention, WINDOWS, WINDOWED_FORM, VIEWED, 9),
    "windows of one mask": (
        windowed_attention,
        (*WINDOWS[:3], 1.5, *WINDOWS[4:]),
        WINDOWED_FORM | {"scaled": "multiplied", "biased": False, "twice": False, "cast": True},
        VIEWED,
        5,
    ),
    "windows of matrices": (
        windowed_attention,
        ((6, 4, 8), (6, 5, 8), (6, 5, 4), 1.5, (6, 1, 5), (3, 1, 4, 5), (1,)),
        WINDOWED_FORM | {"scaled": "", "twice": False},
        [(3, 2, 4, 5), (6, 4, 5)],
        7,
    ),
    "repeated masks": (
        repeated_masks,
        (*WINDOWS[:2], (6, 2, 5, 8), (1, 2, 4, 5), (1, 2, 1, 4, 5)),
        {"biased": True},
        [(3, 2, 1, 4, 5), (6, 1, 4, 5)],
        7,
    ),
    "multiples": (
        attention_of_multiples,
        (HEADS, (1, 4, 5, 8), (1, 4, 5, 8), (3, 5), 1.5),
        {"viewed": False},
        (),
        1,
    ),
    "viewed multiples": (
        attention_of_multiples,
        ((4, 3, 8), (1, 4, 5, 8), (1, 4, 5, 8), (3, 5), 1.5),
        {"viewed": True},
        [(1, 4, 3, 8)],
        2,
    ),
    "heads": (repeated_heads, (HEADS, KEYS, KEYS, (3, 5)), {}, REPEATED, 1),
    "norm": (normed_convolution, ((1, 3, 5, 5), *map(Given, [(4, 3, 3, 3), *[(4,)] * 5])), {}, (), 1),
    "addmm": (product_of_turned, ((5, 8), (6, 8), (6,)), {"has_bias": True}, (), 1),
    "mm": (product_of_turned, ((5, 8), (6, 8), None), {"has_bias": False}, (), 1),
    "rows": (linear_of_rows, ((2, 5, 8), (6, 8), (6,)), {}, [(10, 8), (2, 5, 6)], 1),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_a_rule_computes_what_its_equation_says(name: str) -> None:
    """And does so everywhere: the graph that the equation writes has as many nodes as the rule leaves of it."""
    equation, operands, form, shapes, left = EQUATIONS[name]
    builder, generator = IRBuilder(), torch.Generator().manual_seed(0)
    tensors: list[Any] = []
    values: list[Any] = []
    for number, operand in enumerate(operands):
        shape = operand.shape if isinstance(operand, Given) else operand
        if not isinstance(shape, tuple):
            tensors.append(shape)
            values.append(shape)
            continue
        tensors.append(torch.rand(shape, generator=generator) + 0.5)
        declare = builder.weight if isinstance(operand, Given) else builder.input
        values.append(declare(f"x{number}", shape))
    ir = builder.build(equation(IROps(builder, shapes), *values, **form))
    assert len(optimize(read_graph(ir)).nodes) == left
    given = {f"x{i}": t for i, t in enumerate(tensors) if isinstance(t, torch.Tensor)}
    (result,) = plan_ir(ir).run(given, given)
    expected = equation(TorchOps(shapes), *tensors, **form)
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-4, atol=1e-5)
