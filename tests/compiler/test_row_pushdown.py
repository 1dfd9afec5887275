"""Rows that nobody asks for: where a selection moves ahead, where it stops, and that the result stays the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_compiler.errors import NPUError
from npu_compiler.frontend import coded_layers
from npu_compiler.frontend.ir_reader import read_graph
from npu_compiler.graph.graph_optimizer import eliminate_noops
from npu_compiler.graph.row_pushdown import push_down_selections
from npu_compiler.ir import IRGraph
from tests.support.ir_builder import IRBuilder, Value, overload_of

assert coded_layers  # which defines npu_codes::dequantize

BATCH, ROWS, WIDTH = 2, 8, 6
Build = Callable[["Model", Value], Value]


class Model:
    """A graph over ``h = x @ w.T`` [2, 8, 6], of which every row can be computed alone."""

    def __init__(self) -> None:
        self.builder = IRBuilder()
        self.values: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)
        self.x = self.input("x", (BATCH, ROWS, WIDTH))
        self.h = self.linear(self.x, WIDTH)

    def input(self, name: str, shape: tuple[int, ...]) -> Value:
        self.values[name] = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        return self.builder.input(name, shape)

    def index(self, *positions: int) -> Value:
        self.values["index"] = torch.tensor(positions)
        return self.builder.input("index", (len(positions),), torch.int64)

    def weight(self, *shape: int) -> Value:
        weight = self.builder.weight(f"w{len(self.values)}", shape)
        self.values[weight.name] = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        return weight

    def linear(self, x: Value, outputs: int) -> Value:
        weight = self.weight(outputs, x.meta.shape[-1])
        return self.call("linear.default", x, weight, name=f"linear{len(self.values)}")

    def coded_linear(self, x: Value, outputs: int) -> Value:
        """Of codes of a byte, with a scale for each row."""
        inputs = x.meta.shape[-1]
        codes = self.builder.weight(f"w{len(self.values)}", (outputs, inputs), torch.uint8)
        self.values[codes.name] = torch.randint(256, (outputs, inputs), generator=self._generator, dtype=torch.uint8)
        options = (8, inputs, inputs, 1, 128, torch.float64)
        parts = (codes, self.weight(outputs, 1), None, None, None)
        numbers = self.builder.call("npu_codes.dequantize.default", *parts, *options)
        return self.call("linear.default", x, numbers, name=f"linear{len(self.values)}")

    def call(self, op: str, *args: Any, **kwargs: Any) -> Value:
        return self.builder.call(f"aten.{op}", *args, **kwargs)

    def graph(self, *outputs: Value) -> IRGraph:
        return eliminate_noops(read_graph(self.builder.build(*outputs)))

    def check(self, *outputs: Value, launch_flops: int = 0) -> tuple[IRGraph, IRGraph]:
        """Compares with torch, and gives the graphs before and after."""
        before = self.graph(*outputs)
        after = push_down_selections(before, launch_flops).verify()
        for expected, found in zip(run(before, self.values), run(after, self.values), strict=True):
            assert expected.shape == found.shape
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert work(after) <= work(before)
        assert push_down_selections(after, launch_flops) == after
        return before, after


def run(graph: IRGraph, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """A graph node by node by torch, each result of the shape that the graph declares."""
    known = dict(values)
    for node in graph.nodes:
        read: dict[str, Any] = {}
        for parameter, value in node.inputs.items():
            read[parameter] = known[value] if isinstance(value, str) else [known[name] for name in value]
        if node.op == "getitem":
            made = [read["self"][node.attrs["index"]]]
        else:
            if node.op == "aten.index_select.default":  # here negative ones count from the end
                read["index"] = read["index"] % read["self"].shape[node.attrs["dim"]]
            given = {k: v for k, v in node.attrs.items() if not k.startswith("_")}
            given |= {"dtype": getattr(torch, given["dtype"])} if isinstance(given.get("dtype"), str) else {}
            result = overload_of(node.op)(**read, **given)
            made = [result] if isinstance(result, torch.Tensor) else list(result)
        for name, tensor in zip(node.outputs, made, strict=True):
            assert tuple(tensor.shape) == graph.tensors[name].shape, node
            known[name] = tensor
    return [known[name] for name in graph.outputs]


def work(graph: IRGraph) -> int:
    """Multiplications of all linears."""
    linears = [node for node in graph.nodes if node.op == "aten.linear.default"]
    return sum(
        prod(graph.tensors[node.outputs[0]].shape) * graph.tensors[str(node.inputs["input"])].shape[-1]
        for node in linears
    )


# ---- what rows pass: an op, and the dimension of its result that the rows then are

PASSES: dict[str, tuple[int, Build]] = {
    "add": (1, lambda m, h: m.call("add.Tensor", h, m.input("y", (ROWS, WIDTH)))),
    "add by column": (1, lambda m, h: m.call("mul.Tensor", m.input("y", (WIDTH,)), h)),
    "add by row": (1, lambda m, h: m.call("mul.Tensor", m.input("y", (ROWS, 1)), h)),
    "one row for all": (1, lambda m, h: m.call("mul.Tensor", m.input("y", (BATCH, 1, WIDTH)), h)),
    "more dimensions": (2, lambda m, h: m.call("sub.Tensor", m.input("y", (3, 1, 1, 1)), h)),
    "where": (1, lambda m, h: m.call("where.self", m.call("gt.Scalar", h, 0.1), h, m.input("y", (ROWS, 1)))),
    "gelu": (1, lambda m, h: m.call("gelu.default", h)),
    "transpose": (2, lambda m, h: m.call("transpose.int", h, -1, 1)),
    "permute": (0, lambda m, h: m.call("permute.default", h, [1, 2, 0])),
    "movedim": (2, lambda m, h: m.call("movedim.int", h, 1, -1)),
    "heads": (2, lambda m, h: m.call("transpose.int", m.call("view.default", h, [BATCH, -1, 2, 3]), 1, 2)),
    "reshape ahead": (2, lambda m, h: m.call("reshape.default", h, [1, BATCH, ROWS, 3, 2])),
    "unsqueeze": (2, lambda m, h: m.call("unsqueeze.default", h, 1)),
    "squeeze": (1, lambda m, h: m.call("squeeze.dim", m.call("unsqueeze.default", h, -1), -1)),
    "flatten": (1, lambda m, h: m.call("flatten.using_ints", m.call("unsqueeze.default", h, 2), 2)),
    "expand": (2, lambda m, h: m.call("expand.default", h, [3, -1, -1, -1])),
    "slice": (1, lambda m, h: m.call("slice.Tensor", h, 2, 0, 4)),
    "narrow": (1, lambda m, h: m.call("narrow.default", h, 0, 1, 1)),
    "select ahead": (0, lambda m, h: m.call("select.int", h, 0, -1)),
    "select behind": (1, lambda m, h: m.call("select.int", h, 2, 3)),
    "chunk": (1, lambda m, h: m.call("mul.Tensor", *m.builder.call_all("aten.chunk.default", h, 2, -1))),
    "split": (1, lambda m, h: m.builder.call_all("aten.split_with_sizes.default", h, [1, 5], 2)[1]),
    "unbind": (0, lambda m, h: m.builder.call_all("aten.unbind.int", h, 0)[1]),
    "cat": (1, lambda m, h: m.call("cat.default", [h, m.call("neg.default", h), m.input("y", (BATCH, ROWS, 1))], -1)),
    "stack": (2, lambda m, h: m.call("stack.default", [h, m.call("neg.default", h)], 1)),
    "softmax": (1, lambda m, h: m.call("softmax.int", h, -1)),
    "log_softmax over the batch": (1, lambda m, h: m.call("log_softmax.int", h, 0)),
    "layer norm": (1, lambda m, h: m.call("layer_norm.default", h, [WIDTH], m.weight(WIDTH), m.weight(WIDTH))),
    "rms norm": (1, lambda m, h: m.call("rms_norm.default", h, [WIDTH], m.weight(WIDTH), 1e-6)),
    "mean kept": (1, lambda m, h: m.call("mul.Tensor", m.call("mean.dim", h, [-1], True), h)),
    "sum": (0, lambda m, h: m.call("sum.dim_IntList", h, [0, 2])),
    "amax": (1, lambda m, h: m.call("amax.default", h, [2])),
    "linear": (1, lambda m, h: m.linear(h, 5)),
    "matmul": (1, lambda m, h: m.call("matmul.default", h, m.input("y", (WIDTH, 4)))),
    "batched matmul": (1, lambda m, h: m.call("matmul.default", h, m.input("y", (BATCH, WIDTH, 4)))),
    "matmul of its rows": (1, lambda m, h: m.call("matmul.default", h, m.call("transpose.int", m.x, 1, 2))),
    "bmm": (1, lambda m, h: m.call("bmm.default", h, m.input("y", (BATCH, WIDTH, 4)))),
    "baddbmm": (
        1,
        lambda m, h: m.call("baddbmm.default", m.input("z", (ROWS, 1)), h, m.input("y", (BATCH, WIDTH, 4))),
    ),
    "addmm": (0, lambda m, h: m.call("addmm.default", m.weight(4), m.call("select.int", h, 0, 0), m.weight(WIDTH, 4))),
    "embedding": (1, lambda m, h: m.call("add.Tensor", h, _embedded(m))),
    "attention": (1, lambda m, h: _attention(m, h, None)),
    "attention with a mask": (1, lambda m, h: _attention(m, h, (ROWS, 5))),
    "attention with a mask for all rows": (1, lambda m, h: _attention(m, h, (BATCH, 1, 5))),
}  # fmt: skip


def _embedded(m: Model) -> Value:
    m.values["tokens"] = torch.arange(ROWS) % 3
    return m.call("embedding.default", m.weight(3, WIDTH), m.builder.input("tokens", (ROWS,), torch.int64))


def _attention(m: Model, h: Value, mask: tuple[int, ...] | None) -> Value:
    keys, values = (m.input(name, (BATCH, 5, WIDTH)) for name in ("keys", "values"))
    return m.call("scaled_dot_product_attention.default", h, keys, values, mask and m.input("mask", mask))


def select(m: Model, x: Value, dim: int) -> Value:
    return m.call("select.int", x, dim, 3)


SELECTIONS: dict[str, tuple[int, Callable[[Model, Value, int], Value]]] = {
    "select": (1, select),
    "select the first": (1, lambda m, x, d: m.call("select.int", x, d, 0)),
    "select from the end": (1, lambda m, x, d: m.call("select.int", x, d - len(x.meta.shape), -2)),
    "slice": (3, lambda m, x, d: m.call("slice.Tensor", x, d, -6, 7, 2)),
    "narrow": (2, lambda m, x, d: m.call("narrow.default", x, d, 5, 2)),
    "index_select": (1, lambda m, x, d: m.call("index_select.default", x, d, m.index(6))),
    "index_select of three": (3, lambda m, x, d: m.call("index_select.default", x, d, m.index(6, 0, 6))),
    "from the end": (2, lambda m, x, d: m.call("index_select.default", x, d, m.index(-1, -ROWS))),
}


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("op", PASSES)
def test_a_selection_moves_ahead_of_what_treats_rows_alone(op: str, selection: str) -> None:
    model = Model()
    dim, build = PASSES[op]
    count, choose = SELECTIONS[selection]
    before, after = model.check(choose(model, build(model, model.h), dim))
    assert after != before
    assert after.tensors[model.h.name].shape[1] == count


@pytest.mark.parametrize("rows", [[3], [3, 0, 7]])
def test_rows_by_integer_indexing_move_ahead(rows: list[int]) -> None:
    model = Model()
    flat = model.call("select.int", model.call("gelu.default", model.h), 0, 1)
    _, after = model.check(model.call("index.Tensor", flat, [model.index(*rows)]))
    assert after.tensors[model.h.name].shape == (1, len(rows), WIDTH)  # and of one of the batch


def test_a_row_of_each_sequence_moves_ahead_where_there_is_one_sequence() -> None:
    model = Model()
    one = model.call("slice.Tensor", model.call("gelu.default", model.h), 0, 0, 1)
    chosen = model.call("index.Tensor", one, [model.call("arange.default", 1), model.index(5)])
    _, after = model.check(chosen)
    assert prod(after.tensors[model.h.name].shape) < BATCH * ROWS * WIDTH


def test_the_last_row_of_causal_attention_sees_all() -> None:
    model = Model()
    causal = model.call("scaled_dot_product_attention.default", model.h, model.x, model.x, None, 0.0, True)
    _, after = model.check(model.call("select.int", causal, 1, -1))
    assert after.tensors[model.h.name].shape[1] == 1


# ---- where it stops

STOPS: dict[str, tuple[int, Build]] = {
    "softmax over the rows": (1, lambda m, h: m.call("softmax.int", h, 1)),
    "norm over the rows": (1, lambda m, h: m.call("layer_norm.default", h, [ROWS, WIDTH])),
    "columns of the other operand": (2, lambda m, h: m.call("matmul.default", m.x, m.call("transpose.int", h, 1, 2))),
    "keys": (1, lambda m, h: m.call("scaled_dot_product_attention.default", m.x, h, h)),
    "causal": (1, lambda m, h: m.call("scaled_dot_product_attention.default", h, m.x, m.x, None, 0.0, True)),
    "cat of rows": (1, lambda m, h: m.call("cat.default", [h, h], 1)),
    "rows among columns": (1, lambda m, h: m.call("reshape.default", h, [BATCH, WIDTH, ROWS])),
    "rows among the batch": (0, lambda m, h: m.call("reshape.default", h, [BATCH * ROWS, WIDTH])),
    "cache": (1, lambda m, h: m.call("index_copy.default", m.x, 1, m.index(*range(ROWS)), h)),
    "tril": (1, lambda m, h: m.call("tril.default", h)),
}


@pytest.mark.parametrize("op", STOPS)
def test_a_selection_stops_where_rows_depend_on_each_other(op: str) -> None:
    model = Model()
    dim, build = STOPS[op]
    _, after = model.check(select(model, model.call("gelu.default", build(model, model.h)), dim))
    assert after.tensors[model.h.name].shape[1] == ROWS


def test_a_result_that_another_reads_whole_is_computed_whole() -> None:
    model = Model()
    wide = model.linear(model.h, 5)
    _, after = model.check(select(model, wide, 1), model.call("sum.dim_IntList", model.h, [1]))
    assert after.tensors[model.h.name].shape[1] == ROWS
    assert after.tensors[wide.name].shape[1] == 1


def test_an_output_is_computed_whole() -> None:
    model = Model()
    before, after = model.check(model.h, select(model, model.h, 1))
    assert after == before


def test_different_rows_of_one_result_are_computed_together() -> None:
    model = Model()
    first, last = (model.call("select.int", model.h, 1, row) for row in (0, -1))
    before, after = model.check(first, last)
    assert after == before


def test_the_same_rows_in_several_places_are_taken_once() -> None:
    model = Model()
    index = model.index(4)
    both = [
        model.call("index_select.default", model.call(op, model.h), 1, index) for op in ("relu.default", "neg.default")
    ]
    _, after = model.check(model.call("add.Tensor", *both))
    assert [node.op for node in after.nodes].count("aten.index_select.default") == 1


def test_most_of_the_rows_are_all_of_them() -> None:
    model = Model()
    before, after = model.check(model.call("slice.Tensor", model.h, 1, 1, 6))
    assert after == before


def test_elementwise_work_alone_stays_where_it_is() -> None:
    model = Model()
    y = model.call("relu.default", model.input("y", (ROWS, WIDTH)))
    before, after = model.check(select(model, y, 0))
    assert after == before


def test_the_epilogue_of_what_is_computed_whole_stays_with_it() -> None:
    model = Model()
    image = model.input("image", (1, 3, 8, 8))
    relu = model.call("relu.default", model.call("conv2d.default", image, model.weight(4, 3, 1, 1)))
    rows = model.call("transpose.int", model.call("flatten.using_ints", relu, 2), 1, 2)
    tokens = model.linear(rows, 5)
    _, after = model.check(select(model, tokens, 1))
    assert after.tensors[relu.name].shape == (1, 4, 8, 8)
    assert after.tensors[tokens.name].shape == (1, 1, 5)


def test_an_index_that_is_made_later_is_made_first() -> None:
    model = Model()
    y = model.linear(model.call("gelu.default", model.h), 3)
    index = model.call("add.Tensor", model.index(2), 1)
    _, after = model.check(model.call("index_select.default", y, 1, index))
    assert after.tensors[y.name].shape[1] == 1


def test_an_index_that_depends_on_the_rows_has_them_computed() -> None:
    model = Model()
    total = model.call("sum.dim_IntList", model.h, [0, 1, 2], True)
    index = model.call("to.dtype", model.call("gt.Scalar", model.call("reshape.default", total, [1]), 0), torch.int64)
    y = model.linear(model.h, 3)
    _, after = model.check(model.call("index_select.default", y, 1, index))
    assert after.tensors[model.h.name].shape[1] == ROWS
    assert after.tensors[y.name].shape[1] == 1


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("coded", [False, True])
def test_a_product_leaves_those_that_share_its_input_where_that_saves_more_than_a_launch(
    coded: bool, splits: bool
) -> None:
    model = Model()
    queries, keys = ((model.coded_linear if coded else model.linear)(model.h, 4) for _ in range(2))
    saved = 2 * BATCH * (ROWS - 1) * WIDTH * 4
    scores = model.call("matmul.default", queries, model.call("transpose.int", keys, 1, 2))
    _, after = model.check(select(model, scores, 1), launch_flops=saved if splits else saved + 1)
    assert after.tensors[queries.name].shape[1] == (1 if splits else ROWS)
    assert after.tensors[keys.name].shape[1] == ROWS
    assert after.tensors[scores.name].shape[1] == 1


# ---- what is malformed

_WRONG = [None, "x", 0, -9, 99, 1.5, [1], []]


@pytest.mark.parametrize("wrong", _WRONG, ids=repr)
def test_malformed_attributes_are_left_to_the_definitions(wrong: Any) -> None:
    for dim, build in PASSES.values():
        model = Model()
        ir = model.builder.build(model.call("slice.Tensor", build(model, model.h), dim, 1, 3, 1))
        for node in ir["nodes"]:
            for key in node["attrs"]:
                for attrs in ({**node["attrs"], key: wrong}, {k: v for k, v in node["attrs"].items() if k != key}):
                    changed = {**ir, "nodes": [n | {"attrs": attrs} if n is node else n for n in ir["nodes"]]}
                    with suppress(NPUError):
                        push_down_selections(eliminate_noops(read_graph(changed)), 0).verify()


# ---- anything


def _step(model: Model, draw: Callable[[st.SearchStrategy[Any]], Any], tensors: list[Value]) -> Value:
    """A value that some of the tensors are made into."""
    x, y = (draw(st.sampled_from(tensors)) for _ in range(2))
    dim = draw(st.integers(0, 2))
    match draw(st.sampled_from(["softmax", "norm", "add", "mean", "linear", "matmul", "cat"])):
        case "softmax":
            return model.call("softmax.int", x, dim)
        case "norm":
            return model.call("layer_norm.default", x, [WIDTH])
        case "add":
            return model.call("add.Tensor", x, y)
        case "mean":
            return model.call("sub.Tensor", x, model.call("mean.dim", x, [dim], True))
        case "linear":
            return model.linear(x, WIDTH)
        case "matmul":
            return model.call(
                "matmul.default", model.call("matmul.default", x, model.call("transpose.int", y, 1, 2)), x
            )
        case _:
            both = model.call("cat.default", [x, y], dim)
            return model.call("slice.Tensor", both, dim, 0, x.meta.shape[dim])


@given(data=st.data())
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_random_graphs_compute_the_same(data: st.DataObject) -> None:
    model = Model()
    tensors, outputs = [model.h, model.x], []
    index = model.index(data.draw(st.integers(-ROWS, ROWS - 1)))
    for _ in range(data.draw(st.integers(1, 9))):
        tensors.append(_step(model, data.draw, tensors))
        match data.draw(st.sampled_from(["row", "index", "whole", "nothing"])):
            case "index":
                outputs.append(model.call("index_select.default", tensors[-1], 1, index))
            case "row":
                outputs.append(model.call("select.int", tensors[-1], data.draw(st.integers(0, 2)), 1))
            case "whole":
                outputs.append(tensors[-1])
    model.check(*(outputs or tensors[-1:]), launch_flops=data.draw(st.sampled_from([0, 100, 1 << 30])))
