"""The artifact: what is written is read back, and nothing else is read."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import pytest

from cuda_compiler.artifact.extensions import Cluster, TensorMap
from npu_compiler.artifact.plan import (
    Argument,
    Buffer,
    CallChoice,
    CallOption,
    ExecutionPlan,
    KernelCall,
    KernelSource,
    LibraryCall,
    Role,
)
from npu_compiler.compiled_program import FORMAT_VERSION, CompiledProgram, is_program_file
from npu_compiler.dtypes import FLOAT16, INT16
from npu_compiler.errors import ProgramFormatError
from npu_compiler.tensor.index_check import IndexCheck
from npu_compiler.tensor.layout import BufferSpec, Layout, dense
from tests.runtime.plans import axpy_plan, axpy_program, choice_plan, choice_program, counter_program

Change = Callable[[ExecutionPlan], ExecutionPlan]


def library_program() -> CompiledProgram:
    attrs: dict[str, object] = {"m": 4, "alpha": 1.5, "epilogue": ["bias", "relu"], "transposed": False, "none": None}
    call = LibraryCall("product", "gemm", (Argument(0, 0), Argument(3, 0, writes=True)), attrs, 10, 20)
    plan = replace(axpy_plan(), steps=(*axpy_plan().steps, call))
    return replace(axpy_program(), functions={"prefill": axpy_plan(), "decode": plan})


MAP = TensorMap(FLOAT16, (8, 2), (16,), (64, 2))


def extended_program() -> CompiledProgram:
    """A program with all that only CUDA has: a map of a tensor, and clusters."""
    plan = _with_cluster(Cluster((2, 1, 1)), (4, 1, 1))(_with_map(MAP)(axpy_plan()))
    return replace(axpy_program(), target="cuda", model="extended", functions={"main": plan})


def _with_map(tensor: TensorMap, offset: int = 0) -> Change:
    return _step(lambda step: replace(step, args=(Argument(0, offset, extension=tensor), *step.args[1:])))


def _with_cluster(cluster: Cluster, grid: tuple[int, int, int]) -> Change:
    return _step(lambda step: replace(step, grid=grid, extension=cluster))


def _step(change: Callable[[KernelCall], KernelCall]) -> Change:
    def run(plan: ExecutionPlan) -> ExecutionPlan:
        first = plan.steps[0]
        assert isinstance(first, KernelCall)
        return replace(plan, steps=(change(first),))

    return run


@pytest.mark.parametrize(
    "program",
    [axpy_program(), counter_program(), choice_program(), library_program(), extended_program()],
    ids=lambda p: str(p.model),
)
def test_a_program_is_read_back_as_it_was_written(program: CompiledProgram, tmp_path: Path) -> None:
    path = tmp_path / "model.npubin"
    program.save(path)
    loaded = CompiledProgram.load(path)
    assert loaded == program
    assert loaded.to_bytes() == program.to_bytes() == path.read_bytes()
    assert loaded.describe() == program.describe()
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.npubin"]


def test_a_kernel_that_functions_share_is_written_once() -> None:
    assert library_program().to_bytes().count(b"kernel void axpy") == 1


def test_describe_names_everything() -> None:
    text = library_program().describe()
    for expected in ("axpy", "metal", "float16", "layer.weight", "identity", "arena 512 B", "inner", "outer", "gemm"):
        assert expected in text
    for expected in (
        "grid [1, 1, 1] block [32, 1, 1], 8 parameter bytes",
        "arena+256",
        "40 FLOP",
        "a note",
        "2 launches",
    ):
        assert expected in text
    assert "counter_out is counter" in counter_program().describe()


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ProgramFormatError, match="cannot write"):
        axpy_program().save(tmp_path / "folder")
    with pytest.raises(ProgramFormatError, match="choose a folder that exists"):
        axpy_program().save(tmp_path / "none" / "model.npubin")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProgramFormatError, match="Not a directory"):
        axpy_program().save(tmp_path / "file" / "model.npubin")


def test_an_artifact_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    axpy_program().save(tmp_path / "model.npubin")
    (tmp_path / "other").write_text("")
    assert (tmp_path / "model.npubin").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_saving_again_replaces_the_file(tmp_path: Path) -> None:
    counter_program().save(tmp_path / "model.npubin")
    axpy_program().save(tmp_path / "model.npubin")
    assert CompiledProgram.load(tmp_path / "model.npubin") == axpy_program()


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProgramFormatError, match=r"cannot read '.*none.npubin': No such file"):
        CompiledProgram.load(tmp_path / "none.npubin")


def test_every_truncation_is_refused() -> None:
    data = axpy_program().to_bytes()
    for length in range(0, len(data), 7):
        with pytest.raises(ProgramFormatError, match=r"truncated|do not begin"):
            CompiledProgram.from_bytes(data[:length])
    with pytest.raises(ProgramFormatError, match="expected"):
        CompiledProgram.from_bytes(data + b"\0")


def test_every_flipped_bit_is_refused() -> None:
    data = axpy_program().to_bytes()
    for position in range(0, len(data), 5):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(ProgramFormatError):
            CompiledProgram.from_bytes(bytes(flipped))


def test_another_version_is_refused_with_both_versions() -> None:
    data = bytearray(axpy_program().to_bytes())
    data[8:12] = struct.pack("<I", FORMAT_VERSION + 1)
    with pytest.raises(ProgramFormatError, match=f"version {FORMAT_VERSION + 1} was written by a newer release"):
        CompiledProgram.from_bytes(bytes(data))


def repack(fields: object) -> bytes:
    """An artifact with any body, its length and checksum right."""
    body: bytes = msgpack.packb(fields)
    return struct.pack("<8sI32sQ", b"NPUBIN\0\0", FORMAT_VERSION, hashlib.sha256(body).digest(), len(body)) + body


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "given a list as body"),
        ({}, r"given the fields \[\]"),
        ({1: 2}, "not msgpack"),
        ({"target": msgpack.ExtType(3, b"")}, "given the fields"),
    ],
)
def test_a_body_of_another_schema_is_refused(fields: object, message: str) -> None:
    with pytest.raises(ProgramFormatError, match=message):
        CompiledProgram.from_bytes(repack(fields))


def test_a_kernel_that_the_file_does_not_hold_is_refused() -> None:
    fields = msgpack.unpackb(axpy_program().to_bytes()[52:])
    fields["kernels"] = {}
    with pytest.raises(ProgramFormatError, match=r"uses the kernel .* which the file has not"):
        CompiledProgram.from_bytes(repack(fields))


@pytest.mark.parametrize("number", [-1, 1000])
def test_a_line_that_the_file_does_not_hold_is_refused(number: int) -> None:
    fields = msgpack.unpackb(axpy_program().to_bytes()[52:])
    (kernel,) = fields["kernels"].values()
    kernel[1][0] = number
    with pytest.raises(ProgramFormatError, match="kernel 'axpy' has lines that the file has not"):
        CompiledProgram.from_bytes(repack(fields))


def test_how_a_text_is_divided_makes_no_difference() -> None:
    whole, parts = KernelSource("k", "a\nb\n\nc"), KernelSource("k", "a", "b\n", "c")
    assert whole == parts
    assert hash(whole) == hash(parts)
    assert (whole.text, whole.digest) == (parts.text, parts.digest)
    assert whole != KernelSource("k", "a\nb\n\nd")
    assert whole != KernelSource("l", "a\nb\n\nc")


def test_kernels_share_their_lines() -> None:
    plan = axpy_plan()
    kernels = tuple(KernelSource("axpy", f"{plan.kernels[0].text}// {number}\n") for number in range(99))
    program = replace(axpy_program(), functions={"main": replace(plan, kernels=kernels)})
    assert CompiledProgram.from_bytes(program.to_bytes()) == program
    assert len(program.to_bytes()) < 20 * len(axpy_program().to_bytes())


def _input(layout: Layout) -> Change:
    return lambda plan: replace(plan, inputs=(BufferSpec("x", FLOAT16, FLOAT16, layout),))


IMPOSSIBLE: dict[str, tuple[Change, str]] = {
    "buffer index": (_step(lambda s: replace(s, args=(Argument(9, 0),))), "binds buffer 9 of 4"),
    "negative index": (_step(lambda s: replace(s, args=(Argument(-1, 0),))), "binds buffer -1"),
    "an input written": (_step(lambda s: replace(s, args=(Argument(0, 0, writes=True),))), "writes to the input 'x'"),
    "a weight written": (_step(lambda s: replace(s, args=(Argument(1, 0, writes=True),))), "writes to the weight 'w'"),
    "offset": (_step(lambda s: replace(s, args=(Argument(0, 41),))), "past the end"),
    "negative offset": (_step(lambda s: replace(s, args=(Argument(0, -2),))), "past the end"),
    "kernel index": (_step(lambda s: replace(s, kernel=1)), "launches a missing kernel"),
    "empty grid": (_step(lambda s: replace(s, grid=(0, 1, 1))), "empty grid"),
    "huge block": (_step(lambda s: replace(s, block=(2048, 1, 1))), "launches too much"),
    "cluster": (_with_cluster(Cluster((4, 1, 1)), (6, 1, 1)), "broken clusters"),
    "huge cluster": (_with_cluster(Cluster((16, 1, 1)), (16, 1, 1)), "broken clusters"),
    "empty cluster": (_with_cluster(Cluster((0, 1, 1)), (16, 1, 1)), "broken clusters"),
    "huge params": (_step(lambda s: replace(s, params=bytes(5000))), "5000 parameter bytes"),
    "map of one dimension": (_with_map(replace(MAP, sizes=(8,), strides=(), box=(64,))), "a broken tensor map"),
    "map without a stride": (_with_map(replace(MAP, strides=())), "a broken tensor map"),
    "map of integers": (_with_map(replace(MAP, dtype=INT16)), "a broken tensor map"),
    "map of other lines": (_with_map(replace(MAP, box=(24, 2))), "a broken tensor map"),
    "map of a huge box": (_with_map(replace(MAP, box=(64, 257))), "a broken tensor map"),
    "map of odd rows": (_with_map(replace(MAP, strides=(18,))), "a broken tensor map"),
    "map at an odd place": (_with_map(MAP, 8), "a broken tensor map"),
    "map past the end": (_with_map(replace(MAP, sizes=(8, 3))), "a broken tensor map"),
    "rank": (_input(Layout((4, 5), (4,), (0, 1))), "mismatched shapes"),
    "order": (_input(Layout((4, 5), (4, 5), (0, 0))), "no permutation"),
    "smaller than it holds": (_input(Layout((4, 5), (4, 4), (0, 1))), "impossible size"),
    "negative": (_input(Layout((-4, 5), (4, 5), (0, 1))), "impossible size"),
    "oversized": (_input(dense((1 << 40, 1 << 40))), "impossible size"),
    "input size": (_input(dense((4, 6))), "input buffer 'x' of 40 bytes is declared as 48"),
    "oversized and empty": (_input(dense((0, 1 << 62, 1 << 62))), "impossible size"),
    "two buffers": (lambda p: replace(p, buffers=(*p.buffers, p.buffers[0])), "two buffers are one tensor"),
    "two of a name": (lambda plan: replace(plan, inputs=plan.inputs * 2), "two inputs have one name"),
    "arena": (lambda plan: replace(plan, buffers=(*plan.buffers, Buffer(Role.ARENA, "", -1))), "impossible size"),
    "unknown weight": (lambda p: replace(p, buffers=(*p.buffers, Buffer(Role.WEIGHT, "v", 4))), "declared as None"),
    "faults": (
        lambda p: replace(p, buffers=(*p.buffers, Buffer(Role.FAULTS, "", 8))),
        "the record of faults has another",
    ),
    "check": (
        lambda plan: replace(plan, checks=(IndexCheck("ids", (3, 0), "n", 4),)),
        "the check of 'ids' has impossible",
    ),
    "state": (lambda plan: replace(plan, state=(("out", "y"),)), "the state 'out' is not"),
    "output": (lambda plan: replace(plan, buffers=plan.buffers[:3], steps=plan.steps[:1]), "no step can write"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_program_that_contradicts_itself_is_refused(name: str) -> None:
    change, message = IMPOSSIBLE[name]
    program = replace(axpy_program(), target="cuda", functions={"main": change(axpy_plan())})
    with pytest.raises(ProgramFormatError, match=message):
        CompiledProgram.from_bytes(program.to_bytes())


def _options(change: Callable[[tuple[CallOption, ...]], tuple[CallOption, ...]]) -> ExecutionPlan:
    (choice,) = choice_plan().steps
    assert isinstance(choice, CallChoice)
    return replace(choice_plan(), steps=(CallChoice(change(choice.options)),))


BROKEN_CHOICES: dict[str, tuple[ExecutionPlan, str]] = {
    "none": (_options(lambda options: ()), "has no options"),
    "nothing to do": (_options(lambda options: (CallOption("", ()), *options)), "one that does nothing"),
    "only for some": (_options(lambda options: options[:1]), "no option of 'both' runs on every device"),
    "other result": (
        _options(lambda options: (options[0], CallOption("", options[1].calls[:1]))),
        "the options of 'both' write different buffers",
    ),
    "a call": (replace(choice_plan(), kernels=choice_plan().kernels[:1]), "launches a missing kernel"),
}


@pytest.mark.parametrize("name", BROKEN_CHOICES)
def test_a_broken_choice_is_refused(name: str) -> None:
    plan, message = BROKEN_CHOICES[name]
    with pytest.raises(ProgramFormatError, match=message):
        CompiledProgram.from_bytes(replace(axpy_program(), functions={"main": plan}).to_bytes())


def test_a_description_shows_the_preferred_option() -> None:
    text = choice_program().describe()
    assert "grid [2, 2, 1] block [32, 1, 1], 0 parameter bytes" in text
    assert "preferred of 2 options, for tensor cores" in text
    assert "axpy (" in text
    assert "only in other options" in text


def test_a_description_shows_what_only_the_target_has() -> None:
    text = extended_program().describe()
    assert "binds x+0 in boxes of [64, 2]" in text
    assert "grid [4, 1, 1] block [32, 1, 1] cluster [2, 1, 1]" in text


@pytest.mark.parametrize("target", ["metal", "abacus", "", "../cuda", "cuda_compiler.target:CUDATarget"])
def test_what_only_another_target_has_is_refused(target: str) -> None:
    """No package but one that an entry point names is imported for what a file says."""
    with pytest.raises(ProgramFormatError, match=r"only devices of the target .* understand.* install what"):
        CompiledProgram.from_bytes(replace(extended_program(), target=target).to_bytes())


def test_a_program_of_a_target_that_is_not_installed_is_described() -> None:
    """Only where it holds nothing that is the target's alone."""
    program = CompiledProgram.from_bytes(replace(axpy_program(), target="abacus").to_bytes())
    assert "abacus" in program.describe()


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        (0, "given 0, expected the 2 fields of Cluster"),
        ([[2, 1], False], "expected a list of 3"),
        ([[2, 1, 1.0], False], "expected a value of type int"),
        ([[2, 1, 1], 1], "expected a value of type bool"),
        ([[2, 1, 1]], "expected the 2 fields of Cluster"),
        ({"size": 1}, "expected the 2 fields of Cluster"),
        ("cluster", "expected the 2 fields of Cluster"),
    ],
)
def test_an_extension_of_another_form_is_refused(extension: object, message: str) -> None:
    fields = msgpack.unpackb(extended_program().to_bytes()[52:])
    (step,) = fields["functions"]["main"][1][2]
    assert step[1][-1] == [[2, 1, 1], False]
    step[1][-1] = extension
    with pytest.raises(ProgramFormatError, match=message):
        CompiledProgram.from_bytes(repack(fields))


def test_a_state_of_another_size_than_its_input_is_refused() -> None:
    program = counter_program()
    small = BufferSpec("counter_out", FLOAT16, FLOAT16, dense((1,)))
    plan = replace(program.main, outputs=(small, program.main.outputs[1]))
    with pytest.raises(ProgramFormatError, match="the state 'counter_out'"):
        CompiledProgram.from_bytes(replace(program, functions={"main": plan}).to_bytes())


def test_two_weights_of_one_name_are_refused() -> None:
    """One of them would be written to the memory of the other."""
    program = axpy_program()
    large = replace(program.recipes[0], spec=BufferSpec("w", FLOAT16, FLOAT16, dense((400, 5))))
    with pytest.raises(ProgramFormatError, match="two weights have one name"):
        CompiledProgram.from_bytes(replace(program, recipes=(large, *program.recipes)).to_bytes())


@pytest.mark.parametrize(
    "structure",
    [
        '{"namedtuple": [[true, 0]]}',
        '{"namedtuple": [["\ufb01", 0], ["fi", {"constant": 1}]]}',  # which Python takes for one name
        '{"dict": [["a", 0], ["a", {"constant": 1}]]}',
        '{"dict": [[1, 0], [true, {"constant": 1}]]}',
        '{"dict": [["\\ud800", 0]]}',
        '{"fields": [["__class__", 0]]}',
    ],
)
def test_a_structure_that_nothing_can_be_built_of_is_refused(structure: str) -> None:
    program = replace(axpy_program(), functions={"main": replace(axpy_plan(), structure=structure)})
    with pytest.raises(ProgramFormatError, match="expected a pair of a key of its own and what is nested"):
        CompiledProgram.from_bytes(program.to_bytes())


def test_a_program_without_functions_is_refused() -> None:
    with pytest.raises(ProgramFormatError, match="has no function"):
        CompiledProgram.from_bytes(replace(axpy_program(), functions={}).to_bytes())


def test_a_program_file_is_known_by_its_beginning_or_its_name(tmp_path: Path) -> None:
    saved, renamed, text = (tmp_path / name for name in ("a.npubin", "renamed.bin", "ir.json"))
    axpy_program().save(saved)
    renamed.write_bytes(saved.read_bytes())
    text.write_text("{}")
    assert [is_program_file(path) for path in (saved, renamed, text)] == [True, True, False]
    assert is_program_file(tmp_path / "none.npubin")
    assert not any(is_program_file(path) for path in (tmp_path / "none.bin", tmp_path, "a\0b"))
