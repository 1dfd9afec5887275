"""What checking indices costs a decode step of Qwen2.5-1.5B on a CUDA device.

Run it as ``python -m benchmarks.cuda_index_checks``. The step is compiled as it is and, in this process alone, without
its checks; both run on the same weights and caches, and take turns.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks import cuda_timing
from benchmarks.cuda_qwen import Qwen, Step, bound
from cuda_runtime import CUDAExecutor
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import INT64
from npu_compiler.tensor.symbolic import Tensor
from npu_runtime import Device, load_weights

_STEP, _POSITION, _ROUNDS = Step(1, 2048), 1024, 15


def main() -> None:
    device, qwen = Device("cuda"), Qwen()
    with TemporaryDirectory() as folder:  # where the step is extracted to once
        checked = qwen.compiled([_STEP], Path(folder))
        with patch.object(Tensor, "within", lambda self, extent, **_: self.cast(INT64)):
            unchecked = qwen.compiled([_STEP], Path(folder))
    assert len(checked.main.checks) == 57  # the embedding, and the keys and values of each layer
    assert not unchecked.main.checks
    weights, inputs = load_weights(qwen.weights(), checked, device), qwen.inputs(_STEP)
    inputs["positions"].fill_(_POSITION)
    runs = {
        name: _replay(program, device, inputs, weights)
        for name, program in (("checked", checked), ("unchecked", unchecked))
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            times[name].append(run())
    with_it, without = (median(times[name]) for name in ("checked", "unchecked"))
    print(f"a decode step: {with_it:.4f} ms, without checks {without:.4f} ms: {100 * (with_it / without - 1):+.2f} %")


def _replay(program: CompiledProgram, device: Device, inputs: dict[str, Any], weights: Any) -> Any:
    executor = CUDAExecutor(program, device)
    executor.run(bound(executor.plan, inputs), weights)
    return partial(cuda_timing.milliseconds, executor.replay, executor.stream)


if __name__ == "__main__":
    main()
