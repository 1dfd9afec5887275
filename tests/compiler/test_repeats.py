"""Groups of one form are lowered once, and a program is the same as if each had been lowered by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from benchmarks.compile_time import chain
from npu_compiler.artifact.plan import KernelCall, Step
from npu_compiler.errors import CompileError, InputError
from npu_compiler.lowering import operands
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.params import CheckNumber, Params, ParamStruct, ints
from npu_compiler.lowering.repeats import Lower, Repeats
from npu_runtime import Device
from tests.support.ir_builder import IRBuilder
from tests.support.running import run_ir

LAYERS = 12
on_each_target = pytest.mark.parametrize("target", ["metal", "cuda"])


class Lowered:
    """Counts what is lowered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.lowered = 0
        known = Repeats.lower

        def counted(repeats: Repeats, groups: Sequence[Group], lower: Lower) -> list[Step]:
            def once(members: Sequence[Group]) -> list[Step]:
                self.lowered += 1
                return lower(members)

            self.asked += 1
            return known(repeats, groups, once)

        monkeypatch.setattr(Repeats, "lower", counted)


def alone(monkeypatch: pytest.MonkeyPatch, ir: dict[str, Any], target: str) -> bytes:
    """The program of which each group was lowered by itself."""
    with monkeypatch.context() as patch:
        patch.setattr(Repeats, "lower", lambda repeats, groups, lower: lower(groups))
        return npu_compiler.compile(ir, target=target).to_bytes()


@on_each_target
@pytest.mark.parametrize("name", ["relu(conv2d(x))", "linear", "softmax(x)", "x.T + 0.5", "cat(x, x)[2:6]"])
def test_a_program_is_the_same_as_without(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ir = chain(name, 2 * LAYERS)
    assert npu_compiler.compile(ir, target=target).to_bytes() == alone(monkeypatch, ir, target)


@on_each_target
def test_equal_layers_are_lowered_once(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = Lowered(monkeypatch)
    plan = npu_compiler.compile(chain("relu(conv2d(x))", 2 * LAYERS), target=target).main
    assert lowered.asked >= LAYERS
    assert lowered.lowered <= lowered.asked - LAYERS + 3  # the first, the last, and what packs the image, are others
    calls = [call for call in plan.calls if isinstance(call, KernelCall) and call.label.startswith("n")]
    assert len({call.label for call in calls}) == LAYERS
    assert len({call.args[1:] for call in calls}) > LAYERS // 2  # weights


def test_scratch_is_each_groups_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of parts, of layers whose launches could be ahead of each other, lie where nobody else's do."""
    ir = chain("linear", LAYERS)
    for tensor in [*ir["graph_inputs"], *ir["weights"], *ir["graph_outputs"]]:
        tensor["shape"] = [512 if size == 16 else 64 for size in tensor["shape"]]
    for node in ir["nodes"]:
        for tensor in (*node["inputs"], *node["outputs"]):
            tensor["shape"] = [512 if size in (16, 512) else 64 for size in tensor["shape"]]
    assert npu_compiler.compile(ir, target="cuda").to_bytes() == alone(monkeypatch, ir, "cuda")


ROWS, COLUMNS = 8, 16


def picking() -> dict[str, Any]:
    """Layers that pick rows by indices, each by an input of its own, and normalise what they picked."""
    b = IRBuilder("picking")
    x = b.input("x", (ROWS, COLUMNS), torch.float16)
    for layer in range(LAYERS):
        ids = b.input(f"ids{layer}", (ROWS,), torch.int64)
        x = b.call("aten.softmax.int", b.call("aten.index_select.default", x, 0, ids), -1)
    return b.build(x)


@on_each_target
def test_layers_whose_checks_have_other_numbers_are_lowered_once(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = Lowered(monkeypatch)
    program = npu_compiler.compile(picking(), target=target)
    assert [check.tensor for check in program.main.checks] == [f"ids{layer}" for layer in range(LAYERS)]
    assert lowered.asked == LAYERS
    assert lowered.lowered <= 3
    assert program.to_bytes() == alone(monkeypatch, picking(), target)


@on_each_target
def test_numbers_of_checks_that_nothing_tells_are_not_taken_over(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that a target of others writes where it likes."""
    monkeypatch.setattr(operands, "CheckNumber", int)
    assert npu_compiler.compile(picking(), target=target).to_bytes() == alone(monkeypatch, picking(), target)


@pytest.mark.parametrize("layer", [0, 1, LAYERS // 2, LAYERS - 1])
def test_a_fault_names_the_index_of_its_own_layer(layer: int) -> None:
    inputs = {f"ids{number}": torch.arange(ROWS) for number in range(LAYERS)} | {"x": torch.zeros(ROWS, COLUMNS)}
    inputs[f"ids{layer}"][2] = ROWS + layer
    told = rf"'ids{layer}': given the index {ROWS + layer} at position \[2\], expected 0 to {ROWS - 1}"
    with pytest.raises(InputError, match=told):
        run_ir(picking(), inputs, Device("software-metal"))


@on_each_target
def test_attention_is_lowered_once_for_layers_of_one_mask(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first finds out what blocks of the mask do, and the others share that."""
    b = IRBuilder("attention")
    x = b.input("x", (1, 2, 256, 64), torch.float16)
    mask = b.input("mask", (1, 1, 256, 256), torch.float16)
    for layer in range(LAYERS):
        k, v = (b.input(f"{name}{layer}", (1, 2, 256, 64), torch.float16) for name in "kv")
        x = b.call("aten.scaled_dot_product_attention.default", x, k, v, mask)
    lowered = Lowered(monkeypatch)
    program = npu_compiler.compile(b.build(x), target=target)
    assert lowered.asked >= LAYERS
    assert lowered.lowered <= 4  # the first, the second, the last one's result and what it is copied to
    assert program.to_bytes() == alone(monkeypatch, b.build(x), target)


def test_structs_know_where_they_have_numbers_of_checks() -> None:
    struct = ParamStruct("Params", ints("size", "check0", "check1"))
    packed = struct.pack({"check1": CheckNumber(7), "size": 7, "check0": CheckNumber(3)})
    assert isinstance(packed, Params)
    both = Params.joined([b"\1\0\0\0", packed])
    assert isinstance(both, Params)
    assert np.frombuffer(both.renumbered({3: 5, 7: 3}), np.int32).tolist() == [1, 7, 5, 3]
    assert type(Params.joined([b"ab", b"c"])) is bytes
    with pytest.raises(CompileError, match="missing or unknown"):
        struct.pack({"size": 1})
