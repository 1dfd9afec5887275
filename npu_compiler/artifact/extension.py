"""What only one target has at a launch or at a binding: carried, written and printed here, understood by the target.

A target declares its kinds by an entry point in the group ``npu.extensions`` that is called as the target is and names
an object of `TargetExtensions`. What a file holds beyond the common fields stays plain data until these kinds read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from npu_compiler.errors import ProgramFormatError
from npu_compiler.plugins import entry_points_of, load

__all__ = ["ArgumentExtension", "Extension", "LaunchExtension", "TargetExtensions", "Unread", "extensions_of"]

_GROUP = "npu.extensions"


class Extension:
    """Something that only one target has. Its subclasses are frozen dataclasses of fields that `codec` writes."""


class LaunchExtension(Extension, ABC):
    """What a `KernelCall` has on one target alone."""

    @abstractmethod
    def fault(self, grid: tuple[int, int, int], block: tuple[int, int, int]) -> str:
        """What is wrong with a launch of such a grid, to be said behind its name; empty where nothing is.

        The fields may come from a stranger's file: their types are right, their values anything.
        """

    @abstractmethod
    def describe(self) -> str:
        """It as text, for people."""


class ArgumentExtension(Extension, ABC):
    """What an `Argument` has on one target alone."""

    @abstractmethod
    def fault(self, offset: int, nbytes: int) -> str:
        """As `LaunchExtension.fault`, of what is bound at an offset in a buffer of `nbytes` bytes, or at its end."""

    @abstractmethod
    def describe(self) -> str:
        """It as text, for people."""


@dataclass(frozen=True)
class Unread(Extension):
    """An extension as a file holds it: numbers, text, and lists and mappings of them."""

    data: object


@dataclass(frozen=True)
class TargetExtensions:
    """What the programs of a target may have beyond the common fields: a kind for each, None for nothing."""

    launch: type[LaunchExtension] | None = None
    argument: type[ArgumentExtension] | None = None


def extensions_of(target: str, origin: str) -> TargetExtensions:
    """What a target's package declares; it is imported now.

    Args:
        target: The target's name, from a program that holds extensions.
        origin: Where the program comes from, for error messages.

    Raises:
        ProgramFormatError: No installed package declares any for a target of this name.
        MissingDependencyError: What declares them needs a package that is not installed.
    """
    known = entry_points_of(_GROUP)
    if target not in known:
        raise ProgramFormatError(
            f"{origin}: the program holds what only devices of the target {target!r:.60} understand, and installed "
            f"packages understand it for {', '.join(known)}; install what it was compiled with, or compile it again"
        )
    found = load(_GROUP, target)
    if not isinstance(found, TargetExtensions):
        raise ProgramFormatError(
            f"the entry point '{target}' in '{_GROUP}' names {found!r:.80}, expected an object of TargetExtensions"
        )
    return found
