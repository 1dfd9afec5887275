"""Mutated artifacts: only `ProgramFormatError` comes out of the loader, and memory stays bounded."""

from __future__ import annotations

import hashlib
import resource
import sys
import tracemalloc
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import ProgramFormatError
from tests.artifact.test_artifact import extended_program, library_program, repack
from tests.runtime.plans import counter_program

PROGRAMS = tuple(program().to_bytes() for program in (library_program, counter_program, extended_program))
HEADER = 52
LIMIT = 4 << 20

originals = st.sampled_from(PROGRAMS)
replacements: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6)
    | st.just(msgpack.ExtType(1, b"x")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def load(data: bytes) -> CompiledProgram | None:
    """The program, or None where it is refused; anything else that is raised fails the test, and so does memory."""
    tracemalloc.start()
    try:
        program = CompiledProgram.from_bytes(data)
        program.describe()
    except ProgramFormatError:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < LIMIT
    return program


@given(originals, st.data())
def test_random_bytes_in_the_body_with_the_checksum_repaired(original: bytes, data: st.DataObject) -> None:
    body = bytearray(original[HEADER:])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    load(_with_body(bytes(body)))


@given(originals, st.data())
def test_a_body_cut_or_repeated_with_the_checksum_repaired(original: bytes, data: st.DataObject) -> None:
    body = original[HEADER:]
    start, stop = (data.draw(st.integers(0, len(body))) for _ in range(2))
    load(_with_body(body[:start] + body[stop:]))


@settings(max_examples=300)
@given(originals, st.data())
def test_a_value_anywhere_in_the_body_replaced(original: bytes, data: st.DataObject) -> None:
    fields = msgpack.unpackb(original[HEADER:])
    for _ in range(data.draw(st.integers(1, 3))):
        _replace_one(fields, data)
    load(repack(fields))


def _replace_one(fields: Any, data: st.DataObject) -> None:
    """Replaces, removes or repeats one value at a random place of the tree."""
    node = fields
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        child = node[key]
        if isinstance(child, dict | list) and child and data.draw(st.integers(0, 5)):
            node = child
            continue
        action = data.draw(st.sampled_from(["replace", "remove", "repeat"]))
        if action == "remove":
            del node[key]
        elif action == "repeat" and isinstance(node, list):
            node.insert(key, child)
        else:
            node[key] = data.draw(replacements)
        return


@pytest.mark.parametrize("depth", [10, 500, 1_000_000])
@pytest.mark.parametrize(
    "claim", [b"\x91", b"\xdd\x7f\xff\xff\xff", b"\xdd\x00\x01\x00\x00", b"\xdf\x00\x01\x00\x00\xa1a"]
)
def test_nested_collections_that_claim_to_be_large(claim: bytes, depth: int) -> None:
    data = _with_body(claim * depth)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ProgramFormatError):
        CompiledProgram.from_bytes(data)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < (64 << 10) * (1024 if sys.platform == "darwin" else 1)  # counted in KiB, on macOS in bytes


@pytest.mark.parametrize("claim", [b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"])
def test_a_length_in_the_body_is_not_trusted(claim: bytes) -> None:
    assert load(_with_body(claim)) is None


def _with_body(body: bytes) -> bytes:
    header = bytearray(PROGRAMS[0][:HEADER])
    header[12:44] = hashlib.sha256(body).digest()
    header[44:52] = len(body).to_bytes(8, "little")
    return bytes(header) + body
