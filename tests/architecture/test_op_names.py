"""ATen names are written in `ops/` and where models come in; all other modules ask for traits."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from npu_compiler.ops import definition, get_supported_ops
from tests.architecture.test_imports import imported, modules

MODELS_COME_IN = {
    "npu_compiler.ops",
    "npu_compiler.torch_frontend",
    # These write models themselves, in the IR that a reader then reads: the functions that choose the next token,
    # and those that move what a batch's steps take.
    "npu_compiler.graph.ir_builder",
    "npu_compiler.graph.next_token",
    "npu_compiler.graph.page_copies",
    "npu_compiler.graph.lane_tokens",
    # And these, as a model comes in: what is complex in it becomes nodes of pairs.
    "npu_compiler.frontend.complex_pairs",
    "npu_compiler.frontend.fourier",
    "npu_compiler.frontend.pair_writer",
}

NAMES = {name.removeprefix("aten.") for name in get_supported_ops()}
PARAMETERS = {p.name for entry in map(definition, get_supported_ops()) if entry for p in entry.parameters}
PLAIN = {name.split(".")[0] for name in NAMES} - PARAMETERS  # `index` is an op, and a parameter of others
ELSEWHERE = [name for name in modules() if not any(f"{name}.".startswith(f"{room}.") for room in MODELS_COME_IN)]


def names_written(module: str) -> set[str]:
    """ATen names among the strings of a module.

    With their namespace or overload they are told by themselves. Without them, as ``matmul``, they are also words for
    functions of expressions, steps of views and anchors; so they count where a module knows ops at all.
    """
    strings = set(_strings(ast.parse(modules()[module].read_text())))
    found = {text for text in strings if "aten." in text or ("." in text and text in NAMES)}
    knows_ops = any(name.startswith("npu_compiler.ops") for name in imported(module))
    return found | (strings & (PLAIN | {name.strip("_") for name in PLAIN}) if knows_ops else set())


def _strings(tree: ast.Module) -> Iterator[str]:
    """All strings but those that are statements: documentation."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


@pytest.mark.parametrize("module", ELSEWHERE)
def test_no_op_is_known_by_its_name(module: str) -> None:
    assert names_written(module) == set()


def test_names_would_be_found() -> None:
    assert "aten.cat.default" in names_written("npu_compiler.ops.indexing")
    assert "slice.Tensor" in names_written("npu_compiler.graph.lane_tokens")
