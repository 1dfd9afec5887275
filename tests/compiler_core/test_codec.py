"""Dataclasses to plain lists and back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_compiler.artifact.codec import decode, encode
from npu_compiler.dtypes import ALL, BFLOAT16, DType
from npu_compiler.errors import ProgramFormatError


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Dot:
    colour: Colour
    place: tuple[int, int]


@dataclass(frozen=True)
class Line:
    kind: DType
    dots: tuple[Dot, ...]
    width: float = 1.0


@dataclass(frozen=True)
class Page:
    shapes: tuple[Dot | Line, ...]
    sizes: dict[str, tuple[int, ...]]
    extra: dict[str, object]
    data: bytes
    visible: bool


numbers = st.integers(-(2**63), 2**63 - 1)
dots = st.builds(Dot, st.sampled_from(Colour), st.tuples(numbers, numbers))
lines = st.builds(
    Line,
    st.sampled_from(list(ALL)),
    st.lists(dots, max_size=3).map(tuple),
    st.floats(allow_nan=False, allow_infinity=True),
)
plain: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
pages = st.builds(
    Page,
    st.lists(dots | lines, max_size=4).map(tuple),
    st.dictionaries(st.text(max_size=3), st.lists(numbers, max_size=3).map(tuple), max_size=3),
    st.dictionaries(st.text(max_size=3), plain, max_size=3),
    st.binary(max_size=8),
    st.booleans(),
)
PAGE = Page((Dot(Colour.RED, (1, 2)), Line(BFLOAT16, (Dot(Colour.BLUE, (3, 4)),))), {"a": (1,)}, {"k": [1]}, b"x", True)


@given(pages)
def test_decode_undoes_encode_through_msgpack(page: Page) -> None:
    packed = msgpack.packb(encode(page))
    assert decode(Page, msgpack.unpackb(packed)) == page
    assert msgpack.packb(encode(decode(Page, msgpack.unpackb(packed)))) == packed


def test_the_order_of_a_mapping_does_not_change_the_bytes() -> None:
    assert msgpack.packb(encode({"b": 1, "a": 2})) == msgpack.packb(encode({"a": 2, "b": 1}))


@given(plain)
def test_anything_else_is_refused(data: Any) -> None:
    try:
        decode(Page, data)
    except ProgramFormatError:
        return
    pytest.fail("a page was made of something else")  # no plain value of this size is a page


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ([0], 7, r"page\.shapes: given 7, expected a list"),
        ([0, 0], [0], r"page\.shapes\[0\]: .*expected a pair of an index below 2"),
        ([0, 0, 0], 2, r"shapes\[0\]: .*expected a pair of an index below 2"),
        ([0, 0, 0], -1, r"shapes\[0\]"),
        ([0, 0, 0], 1.0, r"shapes\[0\]"),
        ([0, 0, 0], True, r"shapes\[0\]"),
        ([0, 0, 0], "0", r"shapes\[0\]"),
        ([0, 0, 1, 0], "green", r"shapes\[0\]\.colour: given 'green', expected one of \['red', 'blue'\]"),
        ([0, 0, 1, 0], ["red"], r"colour"),
        ([0, 0, 1, 1], [1, 2, 3], r"place: .*expected a list of 2"),
        ([0, 0, 1, 1, 0], 1.5, r"place\[0\]: given 1\.5, expected a value of type int"),
        ([0, 0, 1, 1, 0], True, r"place\[0\]: given True, expected a value of type int"),
        ([0, 1, 1, 0], "float8", r"kind: given 'float8', expected the name of a data type"),
        ([0, 1, 1, 0], 3, r"kind"),
        ([0, 1, 1, 2], "wide", r"width: given 'wide', expected a value of type float"),
        ([1], [], r"page\.sizes: given \[\], expected a mapping"),
        ([1], {b"a": [1]}, r"expected a value of type str"),
        ([2], {"k": msgpack.ExtType(1, b"x")}, r"page\.extra\.k"),
        ([3], "text", r"page\.data: given 'text', expected a value of type bytes"),
        ([4], 1, r"page\.visible"),
    ],
)
def test_a_wrong_value_is_refused_with_the_path_to_it(path: list[int], value: object, message: str) -> None:
    data = encode(PAGE)
    target = data
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    with pytest.raises(ProgramFormatError, match=message):
        decode(Page, data, "page")


def test_an_integer_is_a_float_where_one_is_expected() -> None:
    width = decode(Line, ["float32", [], 2]).width
    assert width == 2.0
    assert isinstance(width, float)


def test_nesting_without_end_is_refused() -> None:
    data: list[Any] = []
    for _ in range(900):
        data = [data]
    with pytest.raises(ProgramFormatError, match="levels of nesting"):
        decode(dict[str, object], {"k": data})
    with pytest.raises(ProgramFormatError, match="expected a value of type int"):
        decode(tuple[int, ...], data)
