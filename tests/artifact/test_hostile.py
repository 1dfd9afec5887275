"""What an artifact of a stranger may do: compute wrong numbers, or be refused. Nothing of it reaches the machine.

What a kernel does with indices that are merely wrong, and for how long it runs, is the device process's concern:
`test_hostile_runs.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from npu_compiler.artifact.plan import Argument, ExecutionPlan, KernelSource
from npu_compiler.dtypes import FLOAT16, FLOAT32
from npu_compiler.errors import KernelCompileError, NPUError
from npu_compiler.tensor.layout import BufferSpec, dense
from software_gpu import limited_process
from tests.artifact.hostile import BODY, HEAD, kernel, run_artifact, with_kernel, with_plan, with_step
from tests.runtime.plans import AXPY, axpy_plan, axpy_program

SECRET = "the_words_of_a_file_of_the_machine"


def test_the_program_itself_runs() -> None:
    np.testing.assert_allclose(run_artifact(with_kernel(kernel())), np.full((4, 5), 10.0), atol=0.01)


REFUSED = yaml.safe_load((Path(__file__).parent / "refused_kernels.yml").read_text(encoding="utf-8"))
BOMBS = {
    "a long source": f"//{'x' * 300_000}",
    "deep brackets": f"inline int f() {{ return {'(' * 5000}1{')' * 5000}; }}",
    "deep blocks": f"inline void f() {'{' * 5000}{'}' * 5000}",
    "deep statements": f"inline void f(int n) {{ {'if (n) ' * 9000}n = 1; }}",
    "deep negation": f"inline int f(int n) {{ return {'- ' * 50000}n; }}",
    "unclosed brackets": "inline void f() {{{{",
    "closed brackets": "}}}} )",
    "macros": "#define A0 1 +\n"
    + "".join(f"#define A{n} A{n - 1} A{n - 1}\n" for n in range(1, 40))
    + "constant int a = A39 0;",
    "macros with arguments": "#define F(x) x x x x\n#define G(x) F(F(F(F(F(F(x))))))\nconstant int a = G(G(G(1 +))) 0;",
    "recursion of templates": "template <int N> inline int f() { return g<N - 1>() + 1; }\n"
    "template <int N> inline int g() { return f<N>() + f<N - 1>(); }\nconstant int a = f<1000000>();",
    "a loop in a constant": "constexpr int spin() { int n = 0; while (true) n = n + 1 & 255; return n; }\n"
    "constant constexpr int a = spin();",
    "a huge constant": "constant int a[1 << 29] = {1};",
    "a huge array": "inline int f(int n) { int a[1 << 30]; a[n] = 1; return a[n + 1]; }",
}


def refusal(text: str) -> str:
    with pytest.raises(KernelCompileError) as refused:
        run_artifact(with_kernel(text))
    return str(refused.value)


def check_refused(before: str = "", body: str = BODY, says: str = "", canary: str = "") -> None:
    text = refusal(kernel(before, body).replace("CANARY", canary))
    assert any(part in text for part in says.split("|")), text


@pytest.mark.parametrize("name", REFUSED["commands"])
def test_a_kernel_reaches_nothing_of_the_host(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    check_refused(**REFUSED["commands"][name], canary=str(canary))
    assert not canary.exists()


@pytest.mark.parametrize("name", REFUSED["pointers"])
def test_a_pointer_comes_from_a_pointer(name: str) -> None:
    check_refused(**REFUSED["pointers"][name])


@pytest.mark.parametrize("name", REFUSED["files"])
def test_no_file_of_the_machine_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "common.metal").write_text(SECRET)
    monkeypatch.chdir(tmp_path)
    text = refusal(kernel(REFUSED["files"][name].replace("SECRET_FILE", str(tmp_path / "common.metal"))))
    assert SECRET not in text


@pytest.mark.parametrize("name", BOMBS)
def test_a_compiler_is_not_kept_busy(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The source is refused, by a limit at the latest, or compiles within them."""
    monkeypatch.setattr(limited_process, "CPU_SECONDS", 1)
    monkeypatch.setattr(limited_process, "MEMORY_BYTES", 1 << 30)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    text = ""
    try:
        run_artifact(with_kernel(kernel(BOMBS[name])))
    except KernelCompileError as error:
        text = str(error)
    assert text or name in {"a huge constant", "a huge array"}
    assert str(tmp_path) not in text
    assert len(text) < 10_000
    assert not list(tmp_path.iterdir())


def test_a_refusal_names_the_line_and_what_is_allowed() -> None:
    text = refusal(kernel("", "asm();"))
    assert f"line {HEAD.count(chr(10)) + 6}: 'asm'" in text
    assert "A kernel source holds kernels and plain functions with bodies" in text


def _buffer(index: int, **changes: Any) -> Callable[[ExecutionPlan], ExecutionPlan]:
    def change(plan: ExecutionPlan) -> ExecutionPlan:
        buffers = list(plan.buffers)
        buffers[index] = replace(buffers[index], **changes)
        return replace(plan, buffers=tuple(buffers))

    return change


_SMALL = BufferSpec("small", FLOAT16, FLOAT32, dense((2,)))
SIZES = {
    "an offset behind the buffer": with_step(
        args=(Argument(0, 1 << 40), Argument(1, 0), Argument(2, 256, writes=True))
    ),
    "an offset before the buffer": with_step(args=(Argument(0, -16), Argument(1, 0), Argument(2, 256, writes=True))),
    "an offset within an element": with_step(args=(Argument(0, 1), Argument(1, 0), Argument(2, 256, writes=True))),
    "a buffer that is not there": with_step(args=(Argument(7, 0),)),
    "no buffers": with_step(args=()),
    "more buffers than places": with_step(args=(Argument(0, 0),) * 40),
    "no grid": with_step(grid=(0, 1, 1)),
    "a negative grid": with_step(grid=(-1, 1, 1)),
    "a grid beyond 32 bits": with_step(grid=(1 << 40, 1, 1)),
    "a grid beyond 64 bits in all": with_step(grid=((1 << 31) - 1, (1 << 31) - 1, (1 << 31) - 1)),
    "a huge threadgroup": with_step(block=(1024, 1024, 64)),
    "a threadgroup of nothing": with_step(block=(32, 0, 1)),
    "no parameters": with_step(params=b""),
    "few parameters": with_step(params=b"\0\0"),
    "many parameters": with_step(params=bytes(1 << 16)),
    "a kernel that is not there": with_step(kernel=3),
    "huge shared memory": with_step(shared_bytes=1 << 40),
    "a huge arena": with_plan(_buffer(2, nbytes=1 << 47)),
    "an arena of less than nothing": with_plan(_buffer(2, nbytes=-1)),
    "an output larger than it says": with_plan(_buffer(3, nbytes=1 << 20)),
    "a weight larger than it says": with_plan(_buffer(1, nbytes=1 << 20)),
    "an input of another name": with_plan(_buffer(0, name="../x")),
    "an output in the place of a weight": with_plan(lambda plan: replace(plan, state=(("out", "w"),))),
    "an output in the place of itself": with_plan(lambda plan: replace(plan, state=(("out", "out"),))),
    "an output that is a smaller input": with_plan(
        lambda plan: replace(plan, inputs=(*plan.inputs, _SMALL), state=(("out", "small"),))
    ),
    "a kernel of another name": with_plan(lambda plan: replace(plan, kernels=(KernelSource("../../axpy", AXPY.text),))),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_lie_are_refused(name: str) -> None:
    with pytest.raises(NPUError):
        run_artifact(SIZES[name])


def test_a_name_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of such names runs: they are words for people."""
    monkeypatch.chdir(tmp_path)
    path = "../../canary"
    plan = replace(axpy_plan(), notes=(path,))
    run_artifact(replace(axpy_program(), model=path, functions={path: plan}).to_bytes())
    assert not list(tmp_path.rglob("*canary*"))
    assert not (tmp_path / path).exists()
