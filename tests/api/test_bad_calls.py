"""Whatever a public call is given, the answer is a result or an `NPUError` that says what was expected."""
# mypy: disable-error-code="arg-type, call-overload, dict-item, list-item, misc, return-value"

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
import npu_runtime
from cuda_compiler import compile_subgraph, is_cuda_op_supported
from cuda_runtime import CUDAExecutor
from npu_compiler import CompiledProgram, NPUError
from npu_runtime import DAGExecutor, Device, Executor, Generator, MetalBackend, NPUBuffer, load, load_weights
from npu_runtime.cpu_fallback import execute_cpu_partition
from npu_runtime.profiler import Profiler
from tests.api.conftest import Made

Call = Callable[[Any, Any], Any]  # of a model in all its forms and a device; loosely typed, because the calls are wrong

X = np.zeros((2, 8), np.float32)

CALLS: dict[str, Call] = {
    "compile None": lambda m, d: npu_compiler.compile(None),
    "compile a number": lambda m, d: npu_compiler.compile(42),
    "compile a module": lambda m, d: npu_compiler.compile(m.module),
    "compile a list": lambda m, d: npu_compiler.compile([m.extraction.ir]),
    "compile an empty path": lambda m, d: npu_compiler.compile(""),
    "compile a path with a zero": lambda m, d: npu_compiler.compile("a\0b"),
    "compile an empty dict": lambda m, d: npu_compiler.compile({}),
    "compile for no target": lambda m, d: npu_compiler.compile(m.extraction.ir, target="tpu"),
    "compile for a list": lambda m, d: npu_compiler.compile(m.extraction.ir, target=["metal"]),
    "compile for a device": lambda m, d: npu_compiler.compile(m.extraction.ir, target=d),
    "compile in float64": lambda m, d: npu_compiler.compile(m.extraction.ir, dtype="float64"),
    "compile in torch's dtype": lambda m, d: npu_compiler.compile(m.extraction.ir, dtype=torch.int8),
    "compile in a list": lambda m, d: npu_compiler.compile(m.extraction.ir, dtype=["float16"]),
    "compile a program": lambda m, d: npu_compiler.compile(m.program),
    "compile a functions' list": lambda m, d: npu_compiler.compile({"main": [1]}),
    "compile_subgraph of None": lambda m, d: compile_subgraph(None),
    "partition None": lambda m, d: npu_compiler.partition(None),
    "partition a module": lambda m, d: npu_compiler.partition(m.module),
    "partition by a string": lambda m, d: npu_compiler.partition(m.extraction.ir, "metal"),
    "partition by a set": lambda m, d: npu_compiler.partition(m.extraction.ir, {"aten.relu.default"}),
    "partition for no target": lambda m, d: npu_compiler.partition(m.extraction.ir, target="tpu"),
    "partition by words": lambda m, d: npu_compiler.partition(m.extraction.ir, lambda op: "yes"),
    "partition by a failure": lambda m, d: npu_compiler.partition(m.extraction.ir, lambda op: op.no_such_field),
    "partition by too many arguments": lambda m, d: npu_compiler.partition(m.extraction.ir, lambda a, b: True),
    "support for no target": lambda m, d: npu_compiler.is_op_supported("aten.relu.default", "tpu"),
    "supported ops of no target": lambda m, d: npu_compiler.get_supported_ops("tpu"),
    "extract a string": lambda m, d: npu_compiler.extract("model", torch.zeros(1)),
    "extract with a number": lambda m, d: npu_compiler.extract(m.module, 8),
    "extract with None": lambda m, d: npu_compiler.extract(m.module, None),
    "extract to a number": lambda m, d: npu_compiler.extract(m.module, torch.zeros(2, 8), 42),
    "extract to nowhere": lambda m, d: npu_compiler.extract(m.module, torch.zeros(2, 8), "/no/such/folder/m.json"),
    "extract with arrays": lambda m, d: npu_compiler.extract(m.module, X),
    "extract with a shape": lambda m, d: npu_compiler.extract(m.module, (2, 8)),
    "extract under a number": lambda m, d: npu_compiler.extract(m.module, torch.zeros(2, 8), model_name=3),
    "load a program from None": lambda m, d: CompiledProgram.load(None),
    "load a program from a folder": lambda m, d: CompiledProgram.load(m.folder),
    "load a program from IR": lambda m, d: CompiledProgram.load(m.folder / "small.json"),
    "save a program to None": lambda m, d: m.program.save(None),
    "save a program to a folder": lambda m, d: m.program.save(m.folder),
    "a program from a string": lambda m, d: CompiledProgram.from_bytes("NPUBIN"),
    "a device of a number": lambda m, d: Device(1),
    "a device of bytes": lambda m, d: Device(b"cuda"),
    "a device of a class": lambda m, d: Device(MetalBackend),
    "a device for no target": lambda m, d: Device.for_target("tpu"),
    "an executor of a path": lambda m, d: Executor(m.folder / "small.npubin", d),
    "an executor of IR": lambda m, d: Executor(m.extraction.ir),
    "an executor on a number": lambda m, d: Executor(m.program, 0),
    "an executor on torch's device": lambda m, d: Executor(m.program, torch.device("cpu")),
    "an executor on no such device": lambda m, d: Executor(m.program, "gpu"),
    "an executor of no function": lambda m, d: Executor(m.program, d, "decode"),
    "an executor of a number": lambda m, d: Executor(m.program, d, 3),
    "CUDA's executor of None": lambda m, d: CUDAExecutor(None, d),
    "CUDA's executor on Metal": lambda m, d: CUDAExecutor(m.program, d),
    "run with names that are none": lambda m, d: Executor(m.program, d).run({1: X, "x": X}),
    "run for outputs that are none": lambda m, d: Executor(m.program, d).run_and_fetch({"x": X}, None, [["y"]]),
    "run without inputs": lambda m, d: Executor(m.program, d).run({}, load_weights(m.extraction.weights, m.program, d)),
    "run with an array": lambda m, d: Executor(m.program, d).run(X),
    "run with a list": lambda m, d: Executor(m.program, d).run([X]),
    "run with None": lambda m, d: Executor(m.program, d).run(None),
    "run with numbers": lambda m, d: Executor(m.program, d).run({"x": 1.0}),
    "run with text": lambda m, d: Executor(m.program, d).run({"x": "image.jpg"}),
    "run with objects": lambda m, d: Executor(m.program, d).run({"x": np.array([None])}),
    "run with another shape": lambda m, d: Executor(m.program, d).run({"x": X[:1]}),
    "run with integers": lambda m, d: Executor(m.program, d).run({"x": X.astype(np.int64)}),
    "run with complex numbers": lambda m, d: Executor(m.program, d).run({"x": X.astype(np.complex64)}),
    "run without weights": lambda m, d: Executor(m.program, d).run({"x": X}),
    "run with a path": lambda m, d: Executor(m.program, d).run({"x": X}, "small.safetensors"),
    "run with host weights": lambda m, d: Executor(m.program, d).run({"x": X}, m.extraction.weights),
    "weights of None": lambda m, d: load_weights(None, m.program, d),
    "weights of nothing": lambda m, d: load_weights("", m.program, d),
    "weights of a number": lambda m, d: load_weights(3, m.program, d),
    "weights of a list": lambda m, d: load_weights([X], m.program, d),
    "weights of lists": lambda m, d: load_weights({"layer.weight": [1.0], "layer.bias": [1.0]}, m.program, d),
    "weights on the meta device": lambda m, d: load_weights(
        {name: tensor.to("meta") for name, tensor in m.extraction.weights.items()}, m.program, d
    ),
    "sparse weights": lambda m, d: load_weights(
        {name: tensor.to_sparse() for name, tensor in m.extraction.weights.items()}, m.program, d
    ),
    "weights of a module": lambda m, d: load_weights(m.module, m.program, d),
    "weights for a path": lambda m, d: load_weights(m.extraction.weights, "small.npubin", d),
    "weights for None": lambda m, d: load_weights(m.extraction.weights, None),
    "weights on a number": lambda m, d: load_weights(m.extraction.weights, m.program, 0),
    "weights from a device": lambda m, d: load_weights("/dev/null", m.program, d),
    "a buffer of a list": lambda m, d: NPUBuffer.from_numpy([1.0, 2.0], d),
    "a buffer on a number": lambda m, d: NPUBuffer.from_numpy(X, 0),
    "a buffer of a number as spec": lambda m, d: NPUBuffer.from_numpy(X, d, spec=(2, 8)),
    "a buffer of no dtype": lambda m, d: NPUBuffer.from_numpy(X, d, dtype="int4"),
    "a buffer of rounded numbers": lambda m, d: NPUBuffer.from_numpy(X, d, dtype="int32"),
    "a buffer of a dtype beside a spec": lambda m, d: NPUBuffer.from_numpy(
        X, d, spec=m.program.input_specs[0], dtype="float32"
    ),
    "zeros of text": lambda m, d: NPUBuffer.zeros("2x3", d),
    "zeros of fractions": lambda m, d: NPUBuffer.zeros((1.5,), d),
    "zeros of None": lambda m, d: NPUBuffer.zeros(None, d),
    "zeros below zero": lambda m, d: NPUBuffer.zeros((-1,), d),
    "zeros in a number": lambda m, d: NPUBuffer.zeros((2,), d, alloc_shape=3.5),
    "zeros of no dtype": lambda m, d: NPUBuffer.zeros((2,), d, dtype=7),
    "read by a shape": lambda m, d: NPUBuffer.zeros((2,), d).to_numpy(spec=(2,)),
    "read as no dtype": lambda m, d: NPUBuffer.zeros((2,), d).to_numpy(dtype="int4"),
    "memory of no dtype": lambda m, d: NPUBuffer.zeros((2,), d).data.to_numpy(dtype="int4"),
    "memory of other elements": lambda m, d: NPUBuffer.zeros((3,), d, dtype="int8").data.to_numpy(dtype="int64"),
    "memory of another tensor": lambda m, d: NPUBuffer.zeros((3,), d).data.to_numpy(m.program.input_specs[0]),
    "a buffer of the backend of None": lambda m, d: d.backend.allocate_buffer(None),
    "an executor of the backend of None": lambda m, d: d.backend.create_executor(None),
    "a plan of None": lambda m, d: DAGExecutor(None, d),
    "a plan of IR": lambda m, d: DAGExecutor(m.extraction.ir, d),
    "a plan of no plans": lambda m, d: DAGExecutor({}, d),
    "a plan on a number": lambda m, d: DAGExecutor(m.mixed, 1),
    "a plan compiled by text": lambda m, d: DAGExecutor(m.mixed, d, compile_fn="cuda"),
    "a plan compiled to None": lambda m, d: DAGExecutor(m.mixed, d, compile_fn=lambda ir: None),
    "a plan's weights of None": lambda m, d: DAGExecutor(m.mixed, d).load_weights(None),
    "a plan's weights of a number": lambda m, d: DAGExecutor(m.mixed, d).load_weights(1),
    "a plan's inputs in a list": lambda m, d: _loaded(m, d).execute([X]),
    "a plan's inputs of None": lambda m, d: _loaded(m, d).execute(None),
    "a plan's input as a list": lambda m, d: _loaded(m, d).execute({"x": X.tolist()}),
    "a plan's function by number": lambda m, d: _loaded(m, d).execute({"x": X}, function=1),
    "a CPU partition of None": lambda m, d: execute_cpu_partition(None, {}),
    "a CPU partition of an array": lambda m, d: execute_cpu_partition(m.mixed.partitions[-1], X),
    "a profiler of a program": lambda m, d: Profiler(m.program),
    "a generator of a number": lambda m, d: Generator(3),
    "a generator on a number": lambda m, d: Generator(m.folder, 3),
    "a model of None": lambda m, d: load(None),
    "a model of a module": lambda m, d: load(m.module, device=d),
    "a model of a folder": lambda m, d: load(m.folder, device=d),
    "a model that is not there": lambda m, d: load("nowhere.npubin", device=d),
    "a model of weights": lambda m, d: load(m.folder / "small.safetensors", device=d),
    "a model without weights": lambda m, d: load(m.program, device=d),
    "a plan's model without weights": lambda m, d: load(m.mixed, device=d),
    "a model with too much": lambda m, d: load(m.extraction, device=d)(X, X),
    "a model with an input twice": lambda m, d: load(m.extraction, device=d)(X, x=X),
    "a model with another input": lambda m, d: load(m.program, m.extraction.weights, d)(image=X),
    "a model without an input": lambda m, d: load(m.program, m.extraction.weights, d)(),
    "a model of a list": lambda m, d: load(m.program, m.extraction.weights, d)(X.tolist()),
}


def _loaded(made: Made, device: Device) -> DAGExecutor:
    executor = DAGExecutor(made.mixed, device)
    executor.load_weights(made.extraction.weights)
    return executor


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_something_else_is_refused_in_words(
    name: str, made: Made, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NPUError) as caught:
        CALLS[name](made, device)
    assert len(str(caught.value)) > 20
    assert not list(tmp_path.iterdir())


def test_a_name_of_no_op_is_answered() -> None:
    given: list[Any] = ["aten.no_such_op.default", "", None, 3, [], {}, torch.relu, dict]
    for answer in (*map(npu_compiler.is_op_supported, given), *map(is_cuda_op_supported, given)):
        assert not answer
        assert answer.reason


def test_public_names_are_there() -> None:
    for name in ("Backend", "DeviceBuffer", "DAGExecutor", "Model", "load", "NPUBuffer"):
        assert hasattr(npu_runtime, name)
