"""Distributions of others, on Python's path as an installer would have put them there, for the length of a test."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from npu_compiler import plugins
from npu_runtime import device

__all__ = ["TOY_TARGET", "installed", "write_metadata"]

TOY_TARGET = Path(__file__).parents[2] / "examples" / "toy_target"


def write_metadata(source: Path, site: Path) -> None:
    """What an installer writes into a folder of `site` for a distribution, from its ``pyproject.toml`` in `source`."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir()
    described = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(described, encoding="utf-8")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextmanager
def installed(source: Path) -> Iterator[None]:
    """The distribution whose folder `source` is can be imported, and its entry points are found."""
    with TemporaryDirectory() as site:
        write_metadata(source, Path(site))
        paths = [str(source), site]
        sys.path[:0] = paths
        _forget()
        try:
            yield
        finally:
            for path in paths:
                sys.path.remove(path)
            _forget()


def _forget() -> None:
    importlib.invalidate_caches()
    plugins.entry_points_of.cache_clear()
    device._kind.cache_clear()
