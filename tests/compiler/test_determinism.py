"""The same input gives the same bytes, and importing the compiler brings in nothing heavy."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import npu_compiler
import npu_compiler.errors
import npu_model
import npu_runtime
import npu_text
from tests.support.ir_builder import IRBuilder

ROOT = Path(__file__).parents[2]


def model() -> dict[str, Any]:
    """A model with every kind of kernel, BatchNorm to fold and buffers to place."""
    b = IRBuilder("model")
    x = b.input("x", (1, 3, 8, 8))
    image = b.call("aten.conv2d.default", x, b.weight("c", (6, 3, 3, 3)), None, [1, 1], [1, 1])
    statistics = [b.weight(f"n.{name}", (6,)) for name in ("weight", "bias", "mean", "var")]
    image = b.call("aten.relu.default", b.call("aten.batch_norm.default", image, *statistics, False, 0.1, 1e-5, True))
    image = b.call("aten.max_pool2d.default", image, [2, 2])
    rows = b.call("aten.reshape.default", image, (6, 16))
    rows = b.call("aten.linear.default", rows, b.weight("w", (16, 16)), b.weight("b", (16,)))
    joined = b.call("aten.cat.default", [b.call("aten.softmax.int", rows, -1), rows], 1)
    return b.build(b.call("aten.transpose.int", joined, 0, 1), b.call("aten.mean.dim", joined, [0]))


@pytest.mark.parametrize("runs", [True, False])
def test_the_collector_of_cycles_is_as_it_was(runs: bool) -> None:
    was = gc.isenabled()
    (gc.enable if runs else gc.disable)()
    try:
        npu_compiler.compile(model())
        assert gc.isenabled() == runs
        with pytest.raises(npu_compiler.errors.NPUError):
            npu_compiler.compile({**model(), "nodes": 1})
        assert gc.isenabled() == runs
    finally:
        (gc.enable if was else gc.disable)()


def test_compiling_twice_gives_the_same_bytes() -> None:
    assert npu_compiler.compile(model()).to_bytes() == npu_compiler.compile(model()).to_bytes()


@pytest.mark.parametrize("seed", ["1", "4242"])
def test_another_process_gives_the_same_bytes(tmp_path: Path, seed: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(model()))
    program = "import sys, hashlib, npu_compiler\n"
    program += "print(hashlib.sha256(npu_compiler.compile(sys.argv[1]).to_bytes()).hexdigest())"
    output = _python(program, str(path), PYTHONHASHSEED=seed)
    assert output.strip() == hashlib.sha256(npu_compiler.compile(model()).to_bytes()).hexdigest()


def test_importing_the_compiler_imports_no_torch_and_no_gpu_library() -> None:
    program = "import sys, npu_compiler; npu_compiler.get_supported_ops(); print(*sys.modules)"
    loaded = set(_python(program).split())
    assert not loaded & {"torch", "torch_ir", "cupy", "Metal", "objc", "npu_runtime", "software_gpu", "rich"}


def test_importing_the_runtime_imports_no_torch_and_nothing_that_stands_on_it() -> None:
    loaded = set(_python("import sys, npu_runtime; print(*sys.modules)").split())
    assert not loaded & {"torch", "npu_model", "npu_text", "metal_runtime", "cuda_runtime", "software_gpu"}


def test_what_stands_on_the_runtime_is_found_by_the_names_that_users_know() -> None:
    assert [name for name in npu_runtime.__all__ if not hasattr(npu_runtime, name)] == []
    assert npu_runtime.DAGExecutor is npu_model.DAGExecutor
    assert npu_runtime.Generator is npu_text.Generator


def _python(program: str, *args: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
