"""Rules of the sources that no linter knows, by reading their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILERS = sorted(path.name for path in ROOT.glob("*_compiler"))


def nodes(folders: list[str]) -> Iterator[tuple[str, ast.AST]]:
    """All nodes of every source of some folders, with its path."""
    for folder in folders:
        for path, found in _nodes_of(folder):
            yield from ((path, node) for node in found)


@cache
def _nodes_of(folder: str) -> list[tuple[str, list[ast.AST]]]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [(str(path.relative_to(ROOT)), list(ast.walk(ast.parse(path.read_text())))) for path in paths]


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """The trees are a hundred megabytes, which no other test needs."""
    yield
    _nodes_of.cache_clear()


def test_no_compiler_asks_for_the_identity_of_an_object() -> None:
    """Equal expressions are one object, which is a key of its own; a number that may be given again is none."""
    found = [
        f"{path}:{node.lineno}"
        for path, node in nodes(COMPILERS)
        if isinstance(node, ast.Name) and node.id == "id" and isinstance(node.ctx, ast.Load)
    ]
    assert "npu_compiler" in COMPILERS
    assert not found


MOST_PARAMETERS = 8


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    given = function.args
    return [a for a in (*given.posonlyargs, *given.args, *given.kwonlyargs) if a.arg not in ("self", "cls")]


def follows_a_schema(path: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it defines an op, whose parameters are those of ATen, or is an equation, written in terms of such ops."""
    is_equation = [parameter.arg for parameter in parameters(function)[:1]] == ["ops"]
    return is_equation or (path.startswith("npu_compiler/ops/") and bool(function.decorator_list))


def test_no_function_has_more_than_eight_parameters() -> None:
    """What belongs together has a type of its own."""
    packages = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    found = [
        f"{path}:{node.lineno} {node.name}"
        for path, node in nodes([*packages, "benchmarks", "tests", "docs"])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and len(parameters(node)) > MOST_PARAMETERS
        and not follows_a_schema(path, node)
    ]
    assert "npu_compiler" in packages
    assert not found


def is_negative(node: ast.expr) -> bool:
    """Whether a minus comes first in a product."""
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        node = node.left
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


def test_divisions_are_rounded_up_by_one_function() -> None:
    """``ceil_div`` in place of the quotient of a negative number, negated."""
    packages = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    found = [
        f"{path}:{node.lineno}"
        for path, node in nodes([*packages, "benchmarks", "tests", "docs", "examples"])
        if isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.BinOp)
        and isinstance(node.operand.op, ast.FloorDiv)
        and is_negative(node.operand.left)
    ]
    assert [place.partition(":")[0] for place in found] == ["npu_compiler/integers.py"]


def test_no_target_parses_what_the_trace_holds_of_an_op() -> None:
    """The core builds a problem of it, once for all targets."""
    found = [
        f"{path}:{node.lineno}"
        for path, node in nodes([name for name in COMPILERS if name != "npu_compiler"])
        if (isinstance(node, ast.Attribute) and node.attr == "attrs")
        or (isinstance(node, ast.Name) and node.id == "Anchor")
    ]
    assert len(COMPILERS) > 1
    assert not found
