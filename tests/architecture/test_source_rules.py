"""Rules of the sources that no linter knows, by reading their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPILERS = sorted(path.name for path in ROOT.glob("*_compiler"))


def trees(folders: list[str]) -> Iterator[tuple[str, ast.Module]]:
    """Every source of some folders, with its path."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def test_no_compiler_asks_for_the_identity_of_an_object() -> None:
    """Equal expressions are one object, which is a key of its own; a number that may be given again is none."""
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees(COMPILERS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "id" and isinstance(node.ctx, ast.Load)
    ]
    assert "npu_compiler" in COMPILERS
    assert not found
