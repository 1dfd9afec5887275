"""What a kind of device tells `npu doctor` of what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

__all__ = ["Checkup", "Finding"]


class Finding(NamedTuple):
    """One thing that was looked at: `detail` says what was found, or the remedy."""

    subject: str
    works: bool
    detail: str
    fails: bool = False  # what works by another finding does not, or nothing can be kept


@dataclass(frozen=True)
class Checkup:
    """What there is to look at, beside whether the device opens.

    Attributes:
        findings: Called with whether the device opens; tries the parts of it.
        caches: What is kept between runs, with the folder that it is kept in.
        repair: Drops what is damaged, and says so in a line; None where there is nothing to repair.
    """

    findings: Callable[[bool], Iterable[Finding]] = lambda opens: ()
    caches: Mapping[str, Callable[[], Path]] = field(default_factory=dict)
    repair: Callable[[], str] | None = None
