"""What is wrong with an IR is said: what was given, what was expected, what to do."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_compiler
from npu_compiler.errors import CompileError, IRError, UnsupportedOpError
from npu_compiler.frontend.ir_reader import read_graph
from tests.support.ir_builder import IRBuilder

IR = dict[str, Any]


def small() -> IR:
    """relu(linear(x))."""
    builder = IRBuilder("small")
    projected = builder.call("aten.linear.default", builder.input("x", (2, 8)), builder.weight("w", (4, 8)), name="fc")
    return builder.build(builder.call("aten.relu.default", projected, name="act"))


def broken(change: Callable[[IR], Any]) -> IR:
    ir = copy.deepcopy(small())
    change(ir)
    return ir


def _set(path: str, value: Any) -> Callable[[IR], None]:
    """Sets what a path such as ``nodes.0.name`` leads to."""
    *way, last = path.split(".")

    def change(ir: IR) -> None:
        place: Any = ir
        for key in way:
            place = place[int(key)] if key.isdigit() else place[key]
        place[int(last) if last.isdigit() else last] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ir: ir.pop("nodes"), ["given nothing as 'nodes'", "expected a list", "npu_compiler.extract"]),
        (_set("nodes", {}), ["given a dict as 'nodes'", "expected a list"]),
        (_set("nodes.0", 7), ["node 0", "given 7", "expected an object"]),
        (_set("nodes.1.inputs.0.name", "ghost"), ["node 'act'", "'ghost'", "no input, weight or earlier node makes"]),
        (_set("nodes.1.inputs.0.shape", [2, 5]), ["node 'act'", "float32[2, 5]", "made as", "extract the model again"]),
        (_set("nodes.1.inputs.0.dtype", "int64"), ["node 'act'", "int64", "made as"]),
        (_set("graph_inputs.0.shape", [2, "s0"]), ["'x'", "'s0'", "known when compiling", "dynamic_shapes"]),
        (_set("graph_inputs.0.shape", [2, -1]), ["'x'", "-1", "known when compiling"]),
        (_set("graph_inputs.0.shape", [2, 8.0]), ["'x'", "8.0", "known when compiling"]),
        (_set("graph_inputs.0.shape", [1 << 30, 1 << 30]), ["'x'", "more than 2^40 elements"]),
        (_set("graph_inputs.0.dtype", "complex64"), ["unknown data type 'complex64'", "expected one of", "float16"]),
        (_set("graph_outputs.0.name", "ghost"), ["output 'ghost'", "made by no node", "extract the model again"]),
        (_set("nodes.1.outputs.0.name", "x"), ["node 'act'", "'x' is made twice"]),
        (_set("nodes.1.outputs.0.shape", [2, 5]), ["node 'act'", "declares", "its definition gives", "[2, 4]"]),
        (lambda ir: ir["nodes"][0]["inputs"].pop(), ["node 'fc'", "given 1 tensors", "schema needs"]),
        (lambda ir: ir["nodes"].reverse(), ["'fc'", "no input, weight or earlier node makes"]),
        (lambda ir: ir.pop("weights"), ["given nothing as 'weights'", "expected a list"]),
        (_set("weight_name_mapping", {"p_w": "ghost"}), ["ghost"]),
    ],
)
def test_a_damaged_ir_is_refused_in_words(change: Callable[[IR], Any], words: list[str]) -> None:
    with pytest.raises(IRError) as caught:
        npu_compiler.compile(broken(change))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not json", ["is not JSON", "npu_compiler.extract"]),
        (b"\xff\xfe", ["is not JSON"]),
        (b"\x87NPU\r\n\x1a\n\xff\xff", ["is not JSON but a binary file"]),
        (b"[" * 100_000, ["is not JSON"]),
        (b"[1, 2]", ["holds a list", "expected an IR object", "npu_compiler.extract"]),
        (b"null", ["holds a NoneType", "expected an IR object"]),
        (b'{"schema": 3}', ["'graph_inputs'", "expected a list"]),
    ],
)
def test_a_file_that_is_no_ir_is_refused_in_words(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(IRError) as caught:
        npu_compiler.compile(path)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(IRError, match=r"cannot read '.*missing\.json': No such file"):
        npu_compiler.compile(tmp_path / "missing.json")


def test_an_unknown_op_names_the_node_and_the_way_out() -> None:
    with pytest.raises(UnsupportedOpError) as caught:
        npu_compiler.compile(broken(_set("nodes.1.op_type", "aten.special_i0e.default")))
    assert (caught.value.node, caught.value.op) == ("act", "aten.special_i0e.default")
    for word in ("node 'act' (aten.special_i0e.default)", "no definition", "npu_compiler.partition()"):
        assert word in str(caught.value)


def test_an_unknown_attribute_is_refused_and_not_ignored() -> None:
    with pytest.raises(UnsupportedOpError, match=r"the attribute 'negative_slope' \(0\.1\) is not supported"):
        npu_compiler.compile(broken(_set("nodes.1.attrs.negative_slope", 0.1)))


def test_a_dtype_that_the_device_lacks_is_named() -> None:
    builder = IRBuilder()
    x = builder.input("x", (4,), torch.float64)
    with pytest.raises(UnsupportedOpError, match=r"'x' is float64, the device holds .*float16.*; convert the model"):
        npu_compiler.compile(builder.build(builder.call("aten.relu.default", x)))


def test_too_many_dimensions_are_refused() -> None:
    builder = IRBuilder()
    with pytest.raises(UnsupportedOpError, match="has 9 dimensions, at most 8"):
        npu_compiler.compile(builder.build(builder.call("aten.relu.default", builder.input("x", (1,) * 9))))


def test_too_large_a_tensor_is_refused() -> None:
    builder = IRBuilder()
    x = builder.input("x", (1 << 16, 1 << 15))
    with pytest.raises(UnsupportedOpError, match=r"fewer than 2\^31"):
        npu_compiler.compile(builder.build(builder.call("aten.relu.default", x)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "vulkan"}, ["given the target 'vulkan'", "expected one of", "metal"]),
        ({"dtype": "float32"}, ["given dtype='float32'", "computes in float16, bfloat16"]),
    ],
)
def test_a_wrong_option_is_refused_in_words(options: dict[str, str], words: list[str]) -> None:
    with pytest.raises(CompileError) as caught:
        npu_compiler.compile(small(), **options)
    for word in words:
        assert word in str(caught.value)


def test_a_dtype_other_than_the_weights_is_refused() -> None:
    builder = IRBuilder()
    x, w = builder.input("x", (2, 8), torch.bfloat16), builder.weight("w", (4, 8), torch.bfloat16)
    with pytest.raises(CompileError, match="given dtype='float16' for a model whose weights are bfloat16"):
        npu_compiler.compile(builder.build(builder.call("aten.linear.default", x, w)), dtype="float16")


def test_tensors_are_bound_by_the_names_of_the_schema() -> None:
    builder = IRBuilder()
    x, mean, variance = builder.input("x", (2, 3)), builder.weight("m", (3,)), builder.weight("v", (3,))
    normed = builder.call("aten.batch_norm.default", x, None, None, mean, variance, False, 0.1, 1e-5, True)
    (node,) = read_graph(builder.build(normed)).nodes
    assert node.inputs == {"input": "x", "running_mean": "p_m", "running_var": "p_v"}


def test_constants_in_the_ir_become_weights_without_a_file() -> None:
    builder = IRBuilder()
    total = builder.call("aten.add.Tensor", builder.input("x", (3,)), builder.weight("c", (3,)))
    ir = builder.build(total) | {"constants": {"c": {"data": [1.0, 2.0, 3.0], "dtype": "float32"}}}
    (recipe,) = npu_compiler.compile(ir).recipes
    assert (recipe.inputs, len(recipe.data)) == ((), 12)
    ir["constants"]["c"]["data"] = [1.0, 2.0]
    with pytest.raises(IRError, match=r"constant 'c': given the shape \[2\], declared as \[3\]"):
        npu_compiler.compile(ir)


def test_a_path_and_the_object_it_holds_give_the_same_program(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(small()))
    assert npu_compiler.compile(path).to_bytes() == npu_compiler.compile(small()).to_bytes()
