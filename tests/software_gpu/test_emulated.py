"""Kernels for 64-bit Arm under an emulator, where Debian's `qemu-user` is installed: the same bits as natively."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_compiler.integers import ceil_div
from software_gpu.library import Execution, generate
from software_gpu.source import preprocess
from software_gpu.toolchain import toolchain_for
from tests.software_gpu.harness import Array, read_kernels, run
from tests.software_gpu.test_kernels import CASES, Case
from tests.software_gpu.test_levels import BFLOAT, HALF, in_type

EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
# As qemu names them; its neoverse-n1 and max have what neoverse-n1 and apple-m1 need.
PROCESSORS = {"generic": "cortex-a53", "neoverse-n1": "neoverse-n1", "apple-m1": "max"}
KERNELS = ("softmax", "matmul_simdgroup", "matvec", "silu", "max_pool")
HARNESS = Path(__file__).with_name("emulated.cpp")

pytestmark = pytest.mark.skipif(EMULATOR is None, reason="needs qemu-aarch64, of Debian's package qemu-user")


def emulate(case: Case, dtype: np.dtype[Any], execution: Execution, level: str, folder: Path) -> list[Array]:
    """The arguments as the kernel leaves them."""
    toolchain = toolchain_for(level)
    parsed = preprocess(in_type(read_kernels(case.source), dtype), {})
    code, kernels = generate(parsed, execution)
    (described,) = [kernel for kernel in kernels if kernel["name"] == case.kernel]
    form = next(name for name in ("region", "loop", "fiber") if name in described["forms"])  # type: ignore[operator]
    program = folder / f"{case.kernel}-{level}-{execution.value}-{dtype}"
    objects = [folder / "kernel.o", folder / "harness.o"]
    toolchain.compile(code, objects[0])
    toolchain.compile(HARNESS.read_text(), objects[1])
    linker = [part for part in toolchain.linker if part != "-shared"]
    entry = f"--defsym=msl_entry=msl_{form}_{case.kernel}"
    subprocess.run([*linker, "-static", entry, "-o", str(program), *map(str, objects)], check=True)
    arguments = [a if isinstance(a, bytes) else a.astype(dtype).tobytes() for a in case.arguments]
    grid = case.grid or tuple(g * t for g, t in zip(case.groups, case.threads, strict=True))
    groups = tuple(ceil_div(g, t) for g, t in zip(grid, case.threads, strict=True))
    head = np.array([*groups, *case.threads, *grid, len(arguments)], np.uint32).tobytes()
    given = head + b"".join(np.uint64(len(content)).tobytes() + content for content in arguments)
    command = [str(EMULATOR), "-cpu", PROCESSORS[level], str(program)]
    done = subprocess.run(command, input=given, capture_output=True, check=True, timeout=120)
    results, at = [], 0
    for content, argument in zip(arguments, case.arguments, strict=True):
        if not isinstance(argument, bytes):
            results.append(np.frombuffer(done.stdout[at : at + len(content)], dtype).reshape(argument.shape))
        at += len(content)
    return results


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=["half", "bfloat"])
@pytest.mark.parametrize(
    ("level", "execution"),
    [
        ("generic", Execution.FAST),
        ("generic", Execution.FIBERS),
        ("neoverse-n1", Execution.FAST),
        ("apple-m1", Execution.FAST),
    ],
    ids=lambda value: value if isinstance(value, str) else value.value,
)
def test_arm_gives_the_same_bits(level: str, execution: Execution, dtype: np.dtype[Any], tmp_path: Path) -> None:
    for name in KERNELS if (level, execution) == ("generic", Execution.FAST) else KERNELS[:2]:
        case = CASES[name]
        arguments = [a if isinstance(a, bytes) else a.astype(dtype) for a in case.arguments]
        source = in_type(read_kernels(case.source), dtype)
        expected = run(source, case.kernel, arguments, case.groups, case.threads, grid=case.grid)
        for got, wanted in zip(emulate(case, dtype, execution, level, tmp_path), expected, strict=True):
            np.testing.assert_array_equal(got.view(np.uint16), wanted.view(np.uint16), err_msg=name)
