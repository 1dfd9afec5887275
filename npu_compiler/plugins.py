"""What is found, not listed: targets and devices by entry points, and what the modules of a package define."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_compiler.errors import MissingDependencyError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["entry_points_of", "load", "modules_of"]


@cache
def entry_points_of(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name, in the order of their names; none is imported.

    Where several installed distributions have a name, the one that Python's path finds first is taken, as of modules.

    Raises:
        MissingDependencyError: There is none, not even those of this project: its metadata is not installed.
    """
    from importlib.metadata import entry_points  # here: its import takes longer than that of most of this package

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, entry)
    if not found:
        raise MissingDependencyError(
            f"no installed package has an entry point in the group '{group}', though this project has some: it runs "
            "from a folder of sources that is not installed; run `pip install -e .` there"
        )
    return dict(sorted(found.items()))


def load(group: str, name: str) -> Any:
    """The object that an entry point names; the module that defines it is imported now.

    Raises:
        MissingDependencyError: Its package, or one that this imports, is not installed.
    """
    entry = entry_points_of(group)[name]
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the entry point '{name}' in '{group}' ({entry.value}) needs the package '{error.name}', which is not "
            "installed; install it, or what has the entry point again"
        ) from error


@cache
def modules_of(package: str) -> tuple[ModuleType, ...]:
    """All modules of a package and of the packages inside it, imported, in the order of their names."""
    found = walk_packages(import_module(package).__path__, f"{package}.")
    return tuple(import_module(name) for name in sorted(info.name for info in found))
