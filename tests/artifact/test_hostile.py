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

from npu_compiler.artifact.plan import Argument, ExecutionPlan
from npu_compiler.dtypes import FLOAT16, FLOAT32
from npu_compiler.errors import KernelCompileError, NPUError
from npu_compiler.tensor.layout import BufferSpec, dense
from software_gpu import limited_process
from tests.artifact.hostile import BODY, HEAD, kernel, run_artifact, with_kernel, with_plan, with_step
from tests.runtime.plans import AXPY, axpy_plan, axpy_program

SECRET = "the_words_of_a_file_of_the_machine"


def test_the_program_itself_runs() -> None:
    np.testing.assert_allclose(run_artifact(with_kernel(kernel())), np.full((4, 5), 10.0), atol=0.01)


# Name: (before the kernel, the kernel's body, what the refusal says). CANARY and SECRET_FILE are paths.
COMMANDS = {
    "a linkage specification": ('extern "C" int system(const char*);', 'system("touch CANARY");', "'\"'"),
    "a linkage of nothing quoted": ("extern int system(const char* command);", BODY, "'extern'"),
    "a declaration of the host's": ("int system(device const char* command);", "system(0);", "'system'"),
    "a declaration in a function": ("", "void abort(); abort();", "'abort'"),
    "a declaration of types in a function": ("", "int close(int); close(1);", "'close'"),
    "a declaration of pointers in a function": ("", "int system(device const char* p); system(0);", "'system'"),
    "a name of the host": ("", "system(0);", "undeclared identifier 'system'"),
    "a name with a scope": ("", "::std::terminate();", "std"),
    "a constructor attribute": ('__attribute__((constructor)) void start() { system("touch CANARY"); }', BODY, "'\"'"),
    "an attribute of the compiler": ("__attribute__((constructor)) void start() {}", BODY, "'__attribute__'"),
    "an attribute in brackets": ("[[gnu::constructor]] void start() {}", BODY, "an attribute"),
    "an attribute in brackets apart": ("[ [gnu::constructor]] void start() {}", BODY, "an attribute"),
    "an attribute behind a name": ("void start [[gnu::constructor]] () {}", BODY, "an attribute"),
    "alignment": ("", "alignas(4096) float v; result[i] = v;", "'alignas'"),
    "a builtin": ("", "__builtin_trap();", "'__builtin_trap'"),
    "a builtin of atomics": ("", "__atomic_store_n(result, half(1), 0);", "'__atomic_store_n'"),
    "inline assembly": ("", 'asm("hlt");', "'\"'"),
    "inline assembly by another name": ("", "__asm__ volatile (i);", "'__asm__'"),
    "assembly without words": ("asm();", BODY, "'asm'"),
    "a variable that is computed at load": (
        "inline int start() { int n = 0; while (n >= 0) n = n * 3 % 7; return n; }\nconstant int begun = start();",
        BODY,
        "global constructor",
    ),
    "a variable of the library": ("int counter = 0;", BODY, "'counter'"),
    "a variable in parentheses": ("inline int one() { return 1; }\nconstant int begun(one());", BODY, "'begun'"),
    "a variable of a function": ("", "static int counter = 0; result[i] = half(counter++);", "'static'"),
    "a constructor": ("struct Start { Start() { } };\nStart start;", BODY, "a struct that holds more than values"),
    "the machinery of the device": ("", "msl_worker->stacks = nullptr;", "'msl_worker'"),
    "the machinery's namespace": ("", "msl::run_fibers(nullptr, 1, 1, 1, nullptr, nullptr);", "'msl'"),
    "a macro of the headers": ("MSL_EXPORT void start() {}", BODY, "'MSL_EXPORT'"),
    "a namespace": ("namespace msl2 { inline int f() { return 1; } }", BODY, "a namespace"),
    "an operator": ("inline int operator+(AxpyParams a, int b) { return b; }", BODY, "'operator'"),
    "dynamic memory": ("", "device float* p = new float[4];", "'new'"),
    "an exception": ("", "throw 1;", "'throw'"),
    "virtual functions": ("struct A { virtual void f(); };", BODY, "'virtual'"),
    "a lambda": ("", "result[[](int n) { return n; }(0)] = half(1);", "an attribute"),
    "a lambda in an argument": ("", "result[0] = half(max(0.0f, [](float n) { return n; }(0.0f)));", "a lambda"),
    "a module": ("import std;", BODY, "'import'"),
    "a pragma": ("#pragma clang attribute push (constructor)", BODY, "#pragma"),
    "a pragma in words": ('_Pragma("clang diagnostic ignored")', BODY, "'\"'"),
    "an escape": ("int \\u0061sm = 1;", BODY, "\\\\"),
    "a name in another script": ("int ａsm = 1;", BODY, "there are no strings"),
    "a joined name": ("#define JOIN(a, b) a##b\nJOIN(a, sm)();", BODY, "JOIN"),
}
POINTERS = {
    "of a number": ("", "*(device int*)16 = 1;", "no matching conversion"),
    "of nothing": ("", "*(device int*)0 = 1;", "no matching conversion"),
    "of a computed number": ("", "*(device int*)(ulong(i) + 4096) = 1;", "no matching conversion"),
    "of a number by a literal": ("", "device int* p = (device int*){16}; *p = 1;", "no matching constructor"),
    "of nothing by its name": ("", "device int* p = nullptr; p[4] = 1;", "'nullptr'"),
    "of nothing without a cast": ("", "device half* p = 0; p[8] = half(1);", "null pointer"),
    "of nothing in braces": ("", "device int* p{}; p[4] = 1;", "empty braces"),
    "of nothing that is returned": ("inline device int* f() { return {}; }", "f()[4] = 1;", "empty braces"),
    "by another cast": ("", "*reinterpret_cast<device int*>(16ul) = 1;", "'reinterpret_cast'"),
    "by a reference": ("", "ulong n = 16; (device int*&)n = 0;", "a cast to a reference"),
    "by as_type": ("", "*as_type<device int*>(16ul) = 1;", "a pointer or reference without a name"),
    "by a type's other name": ("typedef device int* place;", "*(place)16ul = 1;", "another name of a pointer"),
    "by an alias": ("using place = device int*;", "*place(16ul) = 1;", "another name of a pointer"),
    "by a name in the middle": ("", "device int typedef* place; *(place)16ul = 1;", "another name of a pointer"),
    "by a template's type": (
        "template <typename T> inline T make(T like, ulong n) { return (T)n; }",
        "*make(result, 16ul) = half(1);",
        "is_plain",
    ),
    "by a given type": (
        "template <typename T> inline T make(ulong n) { return (T)n; }",
        "*make<device int*>(16ul) = 1;",
        "a pointer or reference without a name",
    ),
    "by a type that is asked for": ("", "*(decltype(result))16ul = half(1);", "'decltype'"),
    "by a union": ("", "union { ulong n; device int* p; } u; u.n = 16; *u.p = 1;", "'union'"),
    "by a struct": ("struct Both { device int* p; };", "ulong n = 16; *((thread Both*)&n)->p = 1;", "more than values"),
    "by memory that holds one": (
        "",
        "ulong n = 16; thread ulong* at = &n; device int** p = (device int**)at; **p = 1;",
        "can't be read as pointers",
    ),
    "by writing over one": ("", "device half* p = result; *(thread ulong*)&p = 16; *p = half(1);", "holds pointers"),
    "by writing over many": ("", "device half* p[2]; *(thread ulong*)p = 16; *p[0] = half(1);", "holds pointers"),
    "to a function": ("inline void f() {}", "void (*g)() = f; g();", "a pointer or reference to a function"),
    "to a function in parentheses": ("inline void f() {}", "void ((*g))() = f; g();", "to a function"),
    "to a function as a parameter": ("inline void f(void g()) { g(); }", BODY, "a function's parameter"),
    "to a function by reference": ("inline void f() {}", "void (&g)() = f; g();", "to a function"),
    "to a function of no name": ("inline void f() {}", "auto g = f; g();", "'auto'"),
    "to a member": ("", "uint AxpyParams::* m = &AxpyParams::count;", "a pointer to a member"),
    "to code": ("inline void f() {}", "result[0] = *(device half*)f;", "no matching conversion|static assertion"),
    "to a label": ("", "again: result[0] = half((ulong)&&again);", "a label"),
}
FILES = {
    "quoted": '#include "SECRET_FILE"',
    "in brackets": "#include <SECRET_FILE>",
    "by a macro": '#define FILE "SECRET_FILE"\n#include FILE',
    "in two lines": '#inc\\\nlude "SECRET_FILE"',
    "by two characters for one": '%:include "SECRET_FILE"',
    "by three characters for one": '??=include "SECRET_FILE"',
    "behind a comment": '/* */ # /* */ include /* */ "SECRET_FILE"',
    "behind a hidden line": '// \\\n\n#include "SECRET_FILE"',
    "behind another line's end": 'int a;\r#include "SECRET_FILE"',
    "in quotation": '#define Q R"(" /* )"\n#include "SECRET_FILE"\n// */',
    "the next": '#include_next "SECRET_FILE"',
    "imported": '#import "SECRET_FILE"',
    "embedded": 'constant int a[] = {\n#embed "SECRET_FILE"\n};',
    "asked for": '#if __has_include("SECRET_FILE")\n#endif',
    "by the assembler": 'asm(".incbin \\"SECRET_FILE\\"");',
    "as the line": '#line 1 "SECRET_FILE"',
    "as the line in short": '# 1 "SECRET_FILE"',
    "of the project, beside the process": '#include "common.metal"',
    "a name of it": "constant int a = sizeof(__FILE__);",
}
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


@pytest.mark.parametrize("name", COMMANDS)
def test_a_kernel_reaches_nothing_of_the_host(name: str, tmp_path: Path) -> None:
    before, body, words = COMMANDS[name]
    canary = tmp_path / "canary"
    assert words in refusal(kernel(before, body).replace("CANARY", str(canary)))
    assert not canary.exists()


@pytest.mark.parametrize("name", POINTERS)
def test_a_pointer_comes_from_a_pointer(name: str) -> None:
    before, body, words = POINTERS[name]
    text = refusal(kernel(before, body))
    assert any(part in text for part in words.split("|")), text


@pytest.mark.parametrize("name", FILES)
def test_no_file_of_the_machine_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "common.metal").write_text(SECRET)
    monkeypatch.chdir(tmp_path)
    text = refusal(kernel(FILES[name].replace("SECRET_FILE", str(tmp_path / "common.metal"))))
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
    "a kernel of another name": with_plan(lambda plan: replace(plan, kernels=(replace(AXPY, entry="../../axpy"),))),
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
