"""A pytest plugin for interpreters without the extras: leaves out the tests that need what is not installed.

A test file is left out where it, its folder's conftest, or what they import of `tests`, imports such a package; a
single test is skipped where the project itself says that a package is missing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from npu_compiler.errors import MissingDependencyError

_ROOT = Path(__file__).parents[2]
_FOLDERS = frozenset(path.name for path in _ROOT.iterdir() if path.is_dir())


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.is_dir():
        files = [collection_path / "conftest.py"]
    elif collection_path.suffix == ".py":
        files = [collection_path]
    else:
        return None
    return True if any(_lacks(path) for path in files if path.is_file()) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if call.excinfo is not None and isinstance(call.excinfo.value, (MissingDependencyError, ModuleNotFoundError)):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: {call.excinfo.value}")
    return report  # type: ignore[return-value]


@cache
def _lacks(path: Path) -> bool:
    """Whether a file imports, itself or through files of this project, a package that is not there."""
    for name in _imports(ast.parse(path.read_text(encoding="utf-8"))):
        top = name.partition(".")[0]
        if top == "tests":
            source = _ROOT.joinpath(*name.split(".")).with_suffix(".py")
            if source.is_file() and _lacks(source):
                return True
        elif top not in _FOLDERS and find_spec(top) is None:
            return True
    return False


def _imports(tree: ast.Module) -> Iterator[str]:
    """Modules that are imported when the file is: those of its outermost statements."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
