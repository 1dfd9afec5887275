"""Object files of kernels: linked as the compiler's own linker would, for both architectures; damaged ones refused."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from npu_compiler.errors import KernelCompileError
from software_gpu.elf import RELOCATIONS, ElfFile
from software_gpu.library import generate
from software_gpu.machine_code import read_image
from software_gpu.object_file import _ARM, _X86, ADDRESS, THREAD, link_object
from software_gpu.source import preprocess
from software_gpu.toolchain import find_toolchain, toolchain_for
from tests.software_gpu.harness import read_kernels
from tests.software_gpu.test_library import SYNCHRONISING

SOURCES = ("matmul", "rows", "pointwise")
_BASE = 1 << 24
_LINKERS_OWN = ("dynsym", "gnu.hash", "hash", "dynstr", "rela.dyn", "rela.plt", "plt", "dynamic", "got", "got.plt")


def object_file(level: str, name: str, folder: Path) -> Path:
    path = folder / f"{name}.o"
    toolchain_for(level).build(generate(preprocess(read_kernels(name), {}))[0], path)
    return path


@pytest.mark.parametrize("level", ["x86-64-v3", "generic"])
def test_code_is_as_the_linker_makes_it(level: str, tmp_path: Path) -> None:
    """All bytes but those that reach something through a table, whose place is the linker's own choice."""
    pytest.importorskip("ziglang")  # whose linker takes these options
    kinds = _ARM if level == "generic" else _X86
    for name in SOURCES:
        path = object_file(level, name, tmp_path)
        file = ElfFile(path.read_bytes(), name)
        linked = link_object(file)
        script, target = tmp_path / "script", tmp_path / "linked.so"
        rows = [f"{s} {_BASE + begin} : {{ *({s}) }}" for s, (begin, _) in linked.sections.items()]
        tables = " ".join(f".{s} : {{ *(.{s}) }}" for s in _LINKERS_OWN)
        script.write_text(f"SECTIONS {{ . = SIZEOF_HEADERS; {' '.join(rows)} . = {2 * _BASE}; {tables} }}")
        command = [*toolchain_for(level).linker, "-O0", "--no-relax", "-T", str(script), "-o", str(target), str(path)]
        subprocess.run(command, check=True, capture_output=True)
        reference = ElfFile(target.read_bytes(), name)
        through_tables = {
            linked.sections[file.name(file.sections[table.info])][0] + place
            for table in file.sections
            if table.kind == RELOCATIONS and file.name(file.sections[table.info]) in linked.sections
            for place, kind, symbol, _ in file.relocations(table)
            if kinds[kind].through in (ADDRESS, THREAD) or not file.symbols()[symbol].defined
        }
        compared = 0
        for section in reference.sections:
            if reference.name(section) in linked.sections:
                begin, length = linked.sections[reference.name(section)]
                assert (section.address, section.length) == (_BASE + begin, length)
                expected = reference.stored(section.offset, length)
                for at in range(length):
                    if not any(begin + at - back in through_tables for back in range(4)):
                        assert linked.content[begin + at] == expected[at], (name, reference.name(section), at)
                        compared += 1
        assert compared > 1000


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Any bytes changed or missing: an error that names the kernels, or code that only the device will run."""
    path = tmp_path / "kernel.o"
    find_toolchain().build(generate(preprocess(SYNCHRONISING, {}))[0], path)
    whole, chosen = path.read_bytes(), random.Random(1)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole[: chosen.choice([len(whole), chosen.randrange(len(whole))])])
        for _ in range(chosen.randrange(1, 12)):
            place = chosen.choice([chosen.randrange(len(damaged)), len(damaged) - 1 - chosen.randrange(800)])
            damaged[max(place, 0) % len(damaged)] = chosen.choice([0, 1, 0x7F, 0xFF, chosen.randrange(256)])
        path.write_bytes(damaged)
        try:
            read_image(path, "kernels turned")
        except KernelCompileError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('int counter; extern "C" int f() { return ++counter; }', None),
        ('static thread_local int counter; extern "C" int f() { return ++counter; }', None),
        ('extern thread_local int far; extern "C" int f() { return far; }', "relocation"),
        ('extern "C" { __attribute__((visibility("hidden"))) extern int far[]; int f() { return far[1]; } }', "far"),
        (
            'extern "C" { static int g() { return 1; } void* pick() { return (void*)g; } '
            'int f() __attribute__((ifunc("pick"))); }',
            "chosen when it is loaded",
        ),
    ],
    ids=["variable", "variable of a thread", "thread of another", "near another", "chosen when loaded"],
)
def test_what_kernels_have_no_use_for_is_refused(text: str, reason: str | None, tmp_path: Path) -> None:
    path = tmp_path / "kernel.o"
    find_toolchain().build(text, path)
    if reason is None:
        assert read_image(path, "kernel f").variables
    else:
        with pytest.raises(KernelCompileError, match=reason):
            read_image(path, "kernel f")
