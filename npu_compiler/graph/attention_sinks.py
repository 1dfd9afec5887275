"""Attention with sinks: each head has one more score, which takes its share of the weights and brings no value."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from npu_compiler.graph.fusion_patterns import attention_inputs, scores_of, weighted
from npu_compiler.graph.rewrite import Match, Replacement, Rule, Scene, apply, pattern
from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops.attention import attention_with_sinks
from npu_compiler.ops.registry import spelled
from npu_compiler.tensor.trace import MAX_HEAD_SIZE

__all__ = ["attention_beside_sinks", "fuse_attention_with_sinks"]


def attention_beside_sinks(
    ops: Any, q: Any, k: Any, v: Any, scale: Any, mask: Any, sinks: Any,
    *, scaled: str, masked: bool, expanded: bool, shifted: bool, cast: bool,
) -> Any:  # fmt: skip
    """``softmax([q @ k.T * scale + mask, sinks])[..., :-1] @ v``, the sinks of heads [H] in each row's last column."""
    scores = scores_of(ops, q, k, scale, scaled)
    if masked:
        scores = ops.add(scores, mask)
    column = ops.shared(ops.reshape(sinks))
    logits = ops.longer_rows(scores, ops.shared(ops.expand(column)) if expanded else column)
    if shifted:
        logits = ops.sub(logits, ops.largest(logits))
    return weighted(ops, ops.all_but_last(ops.softmax(logits)), v, cast)


def _one_kernel(site: Sequence[Match], scene: Scene) -> Replacement | str:
    (match,) = site
    found, sinks = attention_inputs(match, scene, MAX_HEAD_SIZE), match.values["sinks"]
    if isinstance(found, str) or not isinstance(sinks, str):
        return found if isinstance(found, str) else ""
    inputs, scaled = found
    batch, heads, rows, _ = scene.shape(str(match.values["q"]))
    columns = {scene.shape(node.outputs[0]) for node in match.shared}
    if scene.shape(sinks) != (heads,) or not columns <= {(1, heads, 1, 1), (batch, heads, rows, 1)}:
        return f"its sinks '{sinks}' are {list(scene.shape(sinks))}, expected a number for each of {heads} heads"
    op = spelled(attention_with_sinks)
    node = OpNode(match.root.name, op, {**inputs, "sinks": sinks}, {"scale": scaled.factor}, match.root.outputs)
    return Replacement((*scaled.nodes, node), scaled.tensors)


SINKS = Rule(
    "attention by one kernel",
    tuple(
        pattern(
            attention_beside_sinks, scaled=scaled, masked=masked, expanded=expanded, shifted=shifted, cast=cast
        )
        for scaled, masked, expanded, shifted, cast in product(
            ("multiplied", "divided", ""), (True, False), (True, False), (True, False), (False, True)
        )
    ),
    _one_kernel,
)  # fmt: skip


def fuse_attention_with_sinks(graph: IRGraph) -> IRGraph:
    """Replaces attention with sinks that is spelled out by the op that computes it without storing its scores."""
    return apply(graph, SINKS)
