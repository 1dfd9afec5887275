"""Large products by the vendor's library: what it may add to them, and that the results are torch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cuda_runtime import capability
from cuda_runtime.capability import fitting_options
from cuda_runtime.library import check_call
from npu_compiler.artifact.plan import CallChoice, ExecutionPlan, LibraryCall
from npu_compiler.errors import DeviceError
from npu_runtime import Device
from tests.cuda.test_matvec import CUDAGraph
from tests.metal.graphs import Node

ROWS, WIDTH, DEPTH = 300, 1032, 136
BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def graph_of(kind: str, dtype: torch.dtype) -> tuple[CUDAGraph, Node]:
    """A product, and what is added to it: nothing, a bias, a matrix, or what the library cannot add."""
    graph = CUDAGraph(dtype)
    bias = [graph.weight(WIDTH)] if kind in ("bias", "both") else []
    product = graph.call("linear", graph.input(1, ROWS, DEPTH), graph.weight(WIDTH, DEPTH), *bias)
    if kind in ("matrix", "both"):
        return graph, graph.call("add.Tensor", graph.input(1, ROWS, WIDTH), product)
    if kind == "part of a matrix":
        part = graph.call("slice.Tensor", graph.input(1, ROWS, 2 * WIDTH), 2, WIDTH, 2 * WIDTH)
        return graph, graph.call("add.Tensor", product, part)
    if kind == "column":
        return graph, graph.call("add.Tensor", product, graph.input(1, ROWS, 1))
    return graph, product


def library_steps(plan: ExecutionPlan) -> list[tuple[dict[str, object], int]]:
    """Attributes of the library's calls, and the launches that go with each."""
    options = [option for step in plan.steps if isinstance(step, CallChoice) for option in step.options]
    return [
        (call.attrs, len(option.calls) - 1)
        for option in options
        for call in option.calls
        if isinstance(call, LibraryCall)
    ]


@pytest.mark.parametrize(
    ("kind", "added", "launches"),
    [
        ("nothing", {}, 0),
        ("bias", {"bias": 1}, 0),
        ("matrix", {"addend_row": WIDTH}, 0),
        ("part of a matrix", {"addend_row": 2 * WIDTH}, 0),
        ("both", {}, 1),
        ("column", {}, 1),
    ],
)
def test_what_the_library_adds(kind: str, added: dict[str, int], launches: int) -> None:
    graph, result = graph_of(kind, torch.float16)
    [(attrs, further)] = library_steps(graph.compile(result).main)
    assert {name: attrs[name] for name in ("bias", "addend_row") if name in attrs} == added
    assert further == launches


@BOTH
@pytest.mark.parametrize("kind", ["nothing", "bias", "matrix", "part of a matrix", "both", "column"])
def test_equals_torch(kind: str, dtype: torch.dtype, device: Device) -> None:
    graph, result = graph_of(kind, dtype)
    graph.check(result, roundings=3, device=device)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("generation", [70, 80, 90, 100])
def test_every_device_can_do_without(generation: int, installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "is_installed", lambda: installed)
    graph, result = graph_of("bias", torch.float16)
    [choice] = [step for step in graph.compile(result).main.steps if isinstance(step, CallChoice)]
    [*others, last] = fitting_options(choice, generation)
    assert choice.options[last].requires == ""
    kinds = {choice.options[index].requires for index in others}
    assert kinds == ({"cublas"} if installed else set()) | ({"sm_90a"} if generation == 90 else set())


@BOTH
def test_equals_torch_without_the_library(dtype: torch.dtype, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "is_installed", lambda: False)
    graph, result = graph_of("matrix", dtype)
    graph.check(result, roundings=3, device=device)


def library_call(kind: str) -> tuple[ExecutionPlan, LibraryCall]:
    """A plan, and its call of the library."""
    graph, result = graph_of(kind, torch.float16)
    plan = graph.compile(result).main
    options = [option for step in plan.steps if isinstance(step, CallChoice) for option in step.options]
    return plan, next(call for option in options for call in option.calls if isinstance(call, LibraryCall))


@pytest.mark.parametrize(
    "change",
    [
        *({"bias": 1, "addend_row": 8}, {"m": 0}, {"m": True}, {"addend_row": 1 << 40}, {"dtype": "int8"}),
        {"dtype": ["float16"]},
    ],
)
def test_calls_of_another_release_are_refused(change: dict[str, object]) -> None:
    plan, call = library_call("matrix")
    check_call(call, plan.buffers)
    with pytest.raises(DeviceError, match="compile the model with this release"):
        check_call(replace(call, attrs={**call.attrs, **change}), plan.buffers)


@pytest.mark.parametrize("kind", ["nothing", "bias", "matrix", "part of a matrix"])
def test_calls_stay_within_their_buffers(kind: str) -> None:
    """No kernel is there to be held to them."""
    plan, call = library_call(kind)
    check_call(call, plan.buffers)
    wrong = [{name: int(str(call.attrs[name])) + 8} for name in ("m", "n", "k", "a_row", "b_column", "out_row")]
    wrong += [{"a_row": DEPTH - 8}, {"out_row": 8}]
    for change in wrong:
        with pytest.raises(DeviceError, match="expected one that lies there"):
            check_call(replace(call, attrs={**call.attrs, **change}), plan.buffers)
    *read, written = call.args
    for args in (
        (*read, replace(written, offset=16)),
        (*read, replace(written, writes=False)),
        (replace(read[0], writes=True), *read[1:], written),
    ):
        with pytest.raises(DeviceError, match="expected one that lies there"):
            check_call(replace(call, args=args), plan.buffers)
