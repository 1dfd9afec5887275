"""The artifact: what `compile` makes, `save` writes and a device runs."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]

from npu_compiler.artifact.codec import decode, encode
from npu_compiler.artifact.describe import describe_program
from npu_compiler.artifact.output_file import write_file
from npu_compiler.artifact.plan import ExecutionPlan, KernelSource
from npu_compiler.artifact.program_check import check_program
from npu_compiler.artifact.read_extensions import read_extensions
from npu_compiler.artifact.recipes import WeightRecipe
from npu_compiler.errors import ProgramFormatError
from npu_compiler.tensor.layout import BufferSpec

__all__ = ["FORMAT_VERSION", "CompiledProgram", "is_program_file"]

FORMAT_VERSION = 7
_MAGIC = b"NPUBIN\x00\x00"
_HEADER = struct.Struct("<8sI32sQ")  # magic, version, SHA-256 of the body, bytes of the body
_MAX_ITEMS = 1 << 16  # msgpack reserves room for as many items as a list claims, at each level of nesting


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled model: one or more functions that share one set of weights.

    Attributes:
        target: Target it was compiled for, such as ``metal``.
        model: The model's name.
        compute_dtype: ``float16`` or ``bfloat16``.
        functions: Execution plans by name; a program of one function calls it ``main``.
        recipes: How each weight on the device is made from the weight file.
        version: Version of the file format.
    """

    target: str
    model: str
    compute_dtype: str
    functions: dict[str, ExecutionPlan]
    recipes: tuple[WeightRecipe, ...]
    version: int = FORMAT_VERSION

    def __repr__(self) -> str:
        functions = ", ".join(self.functions)
        return f"CompiledProgram('{self.model}' for {self.target} in {self.compute_dtype}, functions {functions})"

    @property
    def main(self) -> ExecutionPlan:
        """The plan of the only function, or of the one called ``main``."""
        return self.functions["main"] if "main" in self.functions else next(iter(self.functions.values()))

    @property
    def input_specs(self) -> tuple[BufferSpec, ...]:
        """Inputs of `main`, in the model's order."""
        return self.main.inputs

    @property
    def output_specs(self) -> tuple[BufferSpec, ...]:
        """Outputs of `main`, in the model's order."""
        return self.main.outputs

    def describe(self) -> str:
        """The whole program as text: inputs, outputs, state, weights, buffers, and every step with its kernel."""
        header = {
            "program": self.model,
            "target": self.target,
            "compute dtype": self.compute_dtype,
            "format": f"version {self.version}",
            "functions": ", ".join(self.functions),
        }
        return describe_program(header, self.functions, self.recipes)

    def to_bytes(self) -> bytes:
        """The artifact. The same program gives the same bytes."""
        kernels: dict[str, KernelSource] = {}
        functions: dict[str, list[object]] = {}
        for name, plan in self.functions.items():
            kernels.update({kernel.digest: kernel for kernel in plan.kernels})
            digests = [kernel.digest for kernel in plan.kernels]
            functions[name] = [digests, encode(replace(plan, kernels=()))]
        packer = msgpack.Packer()
        lines, packed = _shared_lines(kernels, packer)
        fields = {
            "target": self.target,
            "model": self.model,
            "compute_dtype": self.compute_dtype,
            "lines": lines,
            "kernels": None,
            "functions": functions,
            "recipes": encode(self.recipes),
        }
        parts = [packer.pack_map_header(len(fields))]
        for key, value in fields.items():
            parts += [packer.pack(key), packed if key == "kernels" else packer.pack(value)]
        body = b"".join(parts)
        return _HEADER.pack(_MAGIC, self.version, hashlib.sha256(body).digest(), len(body)) + body

    @classmethod
    def from_bytes(cls, data: bytes, origin: str = "program") -> CompiledProgram:
        """Reads an artifact. Nothing in it is executed, and no length in it is trusted.

        Args:
            data: What `to_bytes` gave.
            origin: Where the bytes come from, for error messages.

        Raises:
            ProgramFormatError: Truncated, altered, of another version, or not an artifact at all; or it holds what only
                a target has that no installed package knows.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ProgramFormatError(
                f"{origin}: given a {type(data).__name__}, expected bytes; load(path) reads a file"
            )
        body = _checked_body(bytes(data), origin)
        try:
            fields = msgpack.unpackb(body, strict_map_key=True, max_array_len=_MAX_ITEMS, max_map_len=_MAX_ITEMS)
        except (ValueError, msgpack.UnpackException, RecursionError) as error:
            raise ProgramFormatError(f"{origin}: the body is not msgpack ({error}); compile the model again") from error
        if not isinstance(fields, dict):
            raise ProgramFormatError(f"{origin}: given a {type(fields).__name__} as body, expected a mapping")
        program = _program_from_fields(fields, origin)
        check_program(program.functions, program.recipes, origin)
        return program

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the artifact, under a temporary name first, so that no half-written file is ever seen.

        Raises:
            ProgramFormatError: The path is no regular file, or the disk is full or may not be written.
        """
        write_file(_path(path), self.to_bytes(), failure=ProgramFormatError)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CompiledProgram:
        """Reads a ``.npubin``.

        Raises:
            ProgramFormatError: The file cannot be read, or is not a valid artifact of this version.
        """
        try:
            data = _path(path).read_bytes()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ProgramFormatError(f"cannot read '{path}': {reason}; give the path of a .npubin") from error
        return cls.from_bytes(data, str(path))


def _path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        given = "an empty path" if path == "" else f"a {type(path).__name__}"
        raise ProgramFormatError(f"given {given}, expected the path of a .npubin")
    return Path(path)


def is_program_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as an artifact does, or is called like one; one that cannot be read is none."""
    if Path(path).suffix == ".npubin":
        return True
    try:
        with Path(path).open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, ValueError):
        return False


def _shared_lines(kernels: Mapping[str, KernelSource], packer: Any) -> tuple[list[str], bytes]:
    """The distinct lines of all kernels, which have most in common; and by digest each kernel's entry and its lines.

    The latter is packed here: what kernels share is hundreds of lines, of which the numbers are packed once.
    """
    lines: dict[str, int] = {}
    parts: dict[str, tuple[int, bytes]] = {}  # which kernels share as a whole: how many lines, and their numbers
    sources = [packer.pack_map_header(len(kernels))]
    for digest, kernel in sorted(kernels.items()):
        for part in kernel.parts:
            if part not in parts:
                numbers = [lines.setdefault(line, len(lines)) for line in part.split("\n")]
                parts[part] = len(numbers), b"".join(map(packer.pack, numbers))
        own = [parts[part] for part in kernel.parts]
        sources += [packer.pack(digest), packer.pack_array_header(2), packer.pack(kernel.entry)]
        sources += [packer.pack_array_header(sum(count for count, _ in own)), *(packed for _, packed in own)]
    return list(lines), b"".join(sources)


def _kernels(fields: Mapping[object, object], origin: str) -> dict[str, KernelSource]:
    """The inverse of `_shared_lines`."""
    lines = decode(tuple[str, ...], fields["lines"], f"{origin}.lines")
    sources = decode(dict[str, tuple[str, tuple[int, ...]]], fields["kernels"], f"{origin}.kernels")
    kernels = {}
    for digest, (entry, numbers) in sources.items():
        if not all(0 <= number < len(lines) for number in numbers):
            raise ProgramFormatError(
                f"{origin}: the kernel '{entry}' has lines that the file has not; compile it again"
            )
        kernels[digest] = KernelSource(entry, "\n".join([lines[number] for number in numbers]))
    return kernels


def _checked_body(data: bytes, origin: str) -> bytes:
    if len(data) < _HEADER.size or data[:8] != _MAGIC:
        raise ProgramFormatError(
            f"{origin}: given {len(data)} bytes that do not begin as a .npubin does; make one with `npu compile`"
        )
    _, version, digest, length = _HEADER.unpack_from(data)
    if version != FORMAT_VERSION:
        newer = "a newer" if version > FORMAT_VERSION else "an older"
        raise ProgramFormatError(
            f"{origin}: format version {version} was written by {newer} release, this one reads version "
            f"{FORMAT_VERSION}; compile the model again with this release"
        )
    body = data[_HEADER.size :]
    if len(body) != length:
        what = "the file is truncated" if len(body) < length else "something was written behind its end"
        raise ProgramFormatError(f"{origin}: {len(body)} bytes of body, expected {length}; {what}, copy it anew")
    if hashlib.sha256(body).digest() != digest:
        raise ProgramFormatError(f"{origin}: the checksum does not match; the file is damaged, copy or compile it anew")
    return body


def _program_from_fields(fields: dict[object, object], origin: str) -> CompiledProgram:
    expected = {"target", "model", "compute_dtype", "lines", "kernels", "functions", "recipes"}
    if set(fields) != expected:
        raise ProgramFormatError(f"{origin}: given the fields {sorted(map(str, fields))}, expected {sorted(expected)}")
    kernels = _kernels(fields, origin)
    raw = decode(dict[str, tuple[tuple[str, ...], object]], fields["functions"], f"{origin}.functions")
    target = decode(str, fields["target"], f"{origin}.target")
    functions = {}
    for name, (digests, data) in raw.items():
        missing = [digest for digest in digests if digest not in kernels]
        if missing:
            raise ProgramFormatError(
                f"{origin}: function '{name}' uses the kernel {missing[0]}, which the file has not; compile it again"
            )
        plan: ExecutionPlan = decode(ExecutionPlan, data, f"{origin}.{name}")
        plan = read_extensions(plan, target, f"{origin}.{name}")
        functions[name] = replace(plan, kernels=tuple(kernels[digest] for digest in digests))
    return CompiledProgram(
        target=target,
        model=decode(str, fields["model"], f"{origin}.model"),
        compute_dtype=decode(str, fields["compute_dtype"], f"{origin}.compute_dtype"),
        functions=functions,
        recipes=decode(tuple[WeightRecipe, ...], fields["recipes"], f"{origin}.recipes"),
    )
