"""Records that change without a call of their constructor are what `dataclasses.replace` gives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import pytest

from npu_compiler.records import changed


@dataclass(frozen=True)
class Box:
    width: int
    height: int = 2

    @cached_property
    def area(self) -> int:
        return self.width * self.height


@dataclass(frozen=True, slots=True)
class Slotted:
    width: int


@dataclass(frozen=True)
class Checked:
    width: int

    def __post_init__(self) -> None:
        if self.width < 0:
            raise ValueError("a width below nothing")


def test_it_is_what_replace_gives() -> None:
    box = Box(3)
    assert box.area == 6
    assert changed(box, height=5) == replace(box, height=5) == Box(3, 5)
    assert changed(box, height=5).area == 15  # what was cached is of the other record
    assert changed(box) == box


def test_fields_that_there_are_not_are_refused() -> None:
    with pytest.raises(TypeError, match="Box has no field area, depth"):
        changed(Box(3), depth=1, area=9)


@pytest.mark.parametrize("record", [Slotted(1), Checked(1)])
def test_records_that_need_their_constructor_are_refused(record: object) -> None:
    with pytest.raises(TypeError, match=r"dataclasses\.replace"):
        changed(record, width=2)
