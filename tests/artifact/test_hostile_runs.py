"""Kernels in the language of kernels whose indices or time are hostile: each runs in a process of the test's own.

They are the device process's concern: the run ends in a `DeviceError` or in wrong numbers, and the process that asked
for it goes on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.artifact.hostile import kernel, with_kernel, with_step

SECONDS = 60
# What the process that was sent the artifact does: it runs it, and then a good one on the same device.
SCRIPT = """
import sys
from pathlib import Path
from npu_compiler.errors import DeviceError
from tests.artifact.hostile import kernel, run_artifact, with_kernel
try:
    run_artifact(Path(sys.argv[1]).read_bytes())
    print("finished")
except DeviceError as error:
    print("refused:", error)
assert abs(run_artifact(with_kernel(kernel())) - 10).max() < 0.01
print("the device works")
"""
RUNS = {
    "a write far away": "result[i + (1l << 40)] = half(1);",
    "a read far away": "result[i] = x[i + (1l << 40)];",
    "a read of nothing": "device const half* p = x - (ulong)x / 2; result[i] = p[0];",
    "writes over its stack": "int a[4]; for (int n = 0; n < 1000000; ++n) a[n + int(i)] = n; result[i] = half(a[i]);",
    "a division by zero": "result[i] = half(int(params.count) / int(i - i));",
    "the least integer divided": "int n = INT_MIN; result[i] = half(n / (int(i) - int(i) - 1));",
    "an endless loop": "device half* p = result; while (true) p[i] += half(1);",
    "an endless loop without an effect": "while (params.count) { }",
    "writes over the buffers beside it": "for (int n = 0; n < 1 << 20; ++n) result[n] = half(1);",
    "a pointer that was never set": "device half* p; p[i] = half(1);",
}


def outcome(artifact: bytes, folder: Path) -> list[str]:
    """What a process says that runs an artifact; it must end by itself, and in time."""
    path = folder / "hostile.npubin"
    path.write_bytes(artifact)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "NPU_SOFTWARE_GPU_SECONDS": "2"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_here_and_the_device_works_again(name: str, tmp_path: Path) -> None:
    first, second = outcome(with_kernel(kernel("", RUNS[name])), tmp_path)
    assert first == "finished" or first.startswith("refused:")
    assert second == "the device works"


def test_a_grid_without_an_end(tmp_path: Path) -> None:
    artifact = with_step(grid=((1 << 31) - 1, 256, 1))
    first, second = outcome(artifact, tmp_path)
    assert first == "finished" or first.startswith("refused:")
    assert second == "the device works"
