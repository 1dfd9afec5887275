"""``addmm(bias, x, w.T)`` and ``mm(x, w.T)`` become linears, also between reshapes [..., k] to [rows, k] and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from npu_compiler.graph.rewrite import Match, Replacement, Rule, Scene, apply, pattern
from npu_compiler.ir import IRGraph
from npu_compiler.ops.linear import linear
from npu_compiler.ops.registry import spelled

__all__ = ["spell_linears"]


def product_of_turned(ops: Any, x: Any, weight: Any, bias: Any, *, has_bias: bool) -> Any:
    """``bias + x @ weight.T``."""
    turned = ops.shared(ops.transpose(weight))
    return ops.addmm(bias, x, turned) if has_bias else ops.mm(x, turned)


def _as_linear(site: Sequence[Match], scene: Scene) -> Replacement | str:
    (match,) = site
    names = match.names("x", "weight", "bias")
    if names is None or len(scene.shape(names[1])) != 2:
        return ""
    inputs = dict(zip(("input", "weight", "bias"), names, strict=False))
    if "bias" in inputs and scene.shape(inputs["bias"]) != scene.shape(inputs["weight"])[:1]:
        return ""
    return Replacement((replace(match.root, op=spelled(linear), inputs=inputs, attrs={}),))


LINEAR = Rule(
    "a linear",
    tuple(pattern(product_of_turned, has_bias=has_bias) for has_bias in (True, False)),
    _as_linear,
)


def linear_of_rows(ops: Any, x: Any, weight: Any, bias: Any) -> Any:
    """A linear of rows: ``reshape(linear(reshape(x)))``, of [..., k] as [rows, k], back to [..., n]."""
    return ops.reshape(ops.linear(ops.shared(ops.reshape(x)), weight, bias))


def _of_whole(site: Sequence[Match], scene: Scene) -> Replacement | str:
    (match,) = site
    back, inner = match.nodes
    names = match.names("x", "weight", "bias")
    if names is None:
        return ""
    given, rows = scene.shape(names[0]), scene.shape(str(inner.inputs["input"]))
    columns = scene.shape(inner.outputs[0])[-1:]
    if len(given) < 2 or given[-1] != rows[-1] or scene.shape(back.outputs[0]) != (*given[:-1], *columns):
        return ""
    return Replacement((replace(inner, inputs={**inner.inputs, "input": names[0]}, outputs=back.outputs),))


OF_WHOLE = Rule("a linear of all dimensions", (pattern(linear_of_rows, ("bias",)),), _of_whole)


def spell_linears(graph: IRGraph) -> IRGraph:
    """Writes products by a transposed matrix as linears, which later passes merge and divide."""
    return apply(apply(graph, LINEAR), OF_WHOLE)
