"""Attention in windows: its masks are added under another view of its scores, in which a batch is images and windows.

So it becomes attention under that view, whose mask is the same for all images. Queries that are multiplied by a number
ahead of it leave that to the scores, which it scales anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import isfinite, prod, sqrt
from typing import Any

from npu_compiler.graph.fusion_patterns import broadcasts, scaled_queries, scores_of, weighted
from npu_compiler.graph.rewrite import Match, Replacement, Rule, Scene, apply, pattern
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.attention import scaled_dot_product_attention
from npu_compiler.ops.elementwise import add
from npu_compiler.ops.registry import spelled, traits_of
from npu_compiler.ops.views import expand, reshape, view_
from npu_compiler.tensor.shapes import broadcast_shapes

__all__ = ["fuse_windowed_attention", "leave_scales_to_scores"]

Shape = tuple[int, ...]
_NONE: Mapping[str, TensorSpec] = {}
_SCALED = ("multiplied", "divided", "")


def windowed_attention(
    ops: Any, q: Any, k: Any, v: Any, scale: Any, bias: Any, mask: Any, further: Any, *, scaled: str, biased: bool,
    twice: bool, cast: bool,
) -> Any:  # fmt: skip
    """``softmax(unview(view(q @ k.T * scale + bias) + mask + further)) @ v``."""
    scores = scores_of(ops, q, k, scale, scaled)
    if biased:
        scores = ops.add(scores, bias)
    scores = ops.add(ops.reshape(scores), mask)
    if twice:
        scores = ops.add(scores, further)
    return weighted(ops, ops.softmax(ops.reshape(scores)), v, cast)


def _under_the_view(site: Sequence[Match], scene: Scene) -> Replacement | str:
    (match,) = site
    names, masks = match.names("q", "k", "v"), match.names("bias", "mask", "further")
    if names is None or masks is None:
        return ""  # a number in place of a tensor
    shapes = [scene.shape(name) for name in names]
    scores = (*shapes[0][:-1], shapes[1][-2])
    whole, viewed = (scene.shape(node.outputs[0]) for node in match.nodes if _writes(node, reshape))
    parts = _parts(scores[:-2], viewed[:-2]) if viewed[-2:] == scores[-2:] else None
    if len({shape[:-2] for shape in shapes}) != 1 or whole != scores or parts is None or len(viewed) < 4:
        given = ", ".join(str(list(shape)) for shape in shapes)
        return f"queries, keys and values are {given}, and their scores are viewed as {list(viewed)}"
    reason = next(_unfit(match, scene, scores, viewed), "")
    scaled = scaled_queries(match, scene)
    if reason or isinstance(scaled, str):
        return reason or str(scaled)
    made = _Making(match.root, scene, list(scaled.nodes), dict(scaled.tensors))
    if "bias" in match.values:
        masks[0] = made.lined_up(masks[0], parts)
    op, attrs = spelled(scaled_dot_product_attention), {"scale": scaled.factor}
    return made.attention(op, attrs, (scaled.query, *names[1:]), masks, viewed[:-2])


def repeated_masks(ops: Any, q: Any, k: Any, v: Any, bias: Any, few: Any, *, biased: bool) -> Any:
    """``attention(q, k, v, bias + repeat(few))``, where masks [1, W, ...] are repeated into [B * W, ...]."""
    masks = ops.shared(ops.reshape(ops.shared(ops.expand(few))))
    return ops.attention(q, k, v, ops.shared(ops.add(bias, masks)) if biased else masks)


def _with_fewer_masks(site: Sequence[Match], scene: Scene) -> Replacement | str:
    (match,) = site
    names, masks = match.names("q", "k", "v"), match.names("bias", "few")
    if names is None or masks is None:
        return ""
    reshaped, expanded = (
        scene.shape(node.outputs[0]) for node in match.shared if _writes(node, reshape) or _writes(node, expand)
    )
    few, query = scene.shape(masks[-1]), scene.shape(names[0])
    lead = expanded[: len(expanded) - 3]
    is_repeated = len(few) < len(expanded) or (few and few[0] == 1)
    parts = _parts(query[:1], lead) if len(query) == len(reshaped) == 4 and lead[:1] > (1,) and is_repeated else None
    if parts is None or reshaped != (query[0], *expanded[-3:]):
        return ""  # another way to lay out a mask
    if len({scene.graph.tensors[name].dtype for name in masks}) > 1:
        return ""
    made = _Making(match.root, scene)
    if "bias" in match.values:
        masks[0] = made.lined_up(masks[0], [*parts, query[1:2]])
    return made.attention(match.root.op, match.root.attrs, names, masks, (*lead, query[1]))


def _writes(node: OpNode, like: Callable[..., Any]) -> bool:
    """Whether an equation writes a node as it writes an op, by its definition."""
    known, wanted = (traits_of(name).term for name in (node.op, spelled(like)))
    return known is not None and wanted is not None and known.name == wanted.name


def _parts(whole: Shape, parts: Shape) -> list[Shape] | None:
    """Which of `parts` each dimension of `whole` is split into; None where dimensions are joined, or are empty."""
    found, at = list[Shape](), 0
    for number, size in enumerate(whole):
        end = min(at + 1, len(parts))
        while prod(parts[at:end]) < size and end < len(parts):
            end += 1
        end = len(parts) if number + 1 == len(whole) else end
        if not size or at == end or prod(parts[at:end]) != size:
            return None
        found.append(parts[at:end])
        at = end
    return found


def _unfit(match: Match, scene: Scene, scores: Shape, viewed: Shape) -> Iterator[str]:
    """Why masks cannot be those of attention, in words."""
    places = {"bias": scores, "mask": viewed, "further": viewed}
    specs = {place: scene.graph.tensors[str(match.values[place])] for place in places if place in match.values}
    for place, spec in specs.items():
        if not broadcasts(spec.shape, places[place]):
            yield f"the mask {list(spec.shape)} does not broadcast to the scores {list(places[place])}"
    kinds = {spec.dtype for spec in specs.values()}
    if len(kinds) > 1 or not all(kind.is_float for kind in kinds):
        yield f"its masks are of {', '.join(sorted(map(str, kinds)))}, expected one kind of floating point"


class _Making:
    """The nodes that take the place of a match, and what they need declared."""

    def __init__(
        self, root: OpNode, scene: Scene, nodes: Sequence[OpNode] = (), tensors: Mapping[str, TensorSpec] = _NONE
    ) -> None:
        self._nodes, self._tensors = list(nodes), dict(tensors)
        self._root, self._scene = root, scene

    def attention(
        self, op: str, attrs: Mapping[str, Any], names: Sequence[str], masks: Sequence[str], lead: Shape
    ) -> Replacement:
        """Attention with the sum of masks under a view, and its result as it was before.

        Args:
            op, attrs: Of the node.
            names: Queries, keys and values.
            masks: What is added to the scores under the view.
            lead: All dimensions of the view but the last two, of which only the heads are as they were.
        """
        inputs: dict[str, str | tuple[str, ...]] = {
            key: self._view(name, (*lead, *self._spec(name).shape[-2:]), key)
            for key, name in zip(("query", "key", "value"), names, strict=True)
        }
        inputs["attn_mask"] = self._sum(masks)
        root, (result,) = self._root, self._root.outputs
        shape = self._spec(result).shape
        viewed = self._declare("result", (*lead, *shape[-2:]), result)
        self._nodes.append(OpNode(root.name, op, inputs, attrs, (viewed,)))
        self._nodes.append(OpNode(viewed, spelled(view_), {"self": viewed}, {"size": list(shape)}, (result,)))
        return Replacement(tuple(self._nodes), self._tensors)

    def lined_up(self, mask: str, parts: Sequence[Shape]) -> str:
        """A mask under a view that splits the dimensions of its scores, all but the last two, into such parts."""
        given = self._spec(mask).shape
        whole = (1,) * (len(parts) + 2 - len(given)) + given
        split = (part if n != 1 else (1,) * len(part) for n, part in zip(whole[:-2], parts, strict=True))
        return self._view(mask, (*(n for part in split for n in part), *whole[-2:]), "bias")

    def _spec(self, name: str) -> TensorSpec:
        return self._tensors[name] if name in self._tensors else self._scene.graph.tensors[name]

    def _declare(self, part: str, shape: Shape, like: str) -> str:
        """A tensor of the data type of another one, called after what it is for."""
        name = f"{part} of {self._root.name}"
        self._tensors[name] = replace(self._spec(like), name=name, shape=shape)
        return name

    def _view(self, name: str, shape: Shape, part: str) -> str:
        """A tensor under another shape."""
        if self._spec(name).shape == shape:
            return name
        made = self._declare(part, shape, name)
        self._nodes.append(OpNode(made, spelled(view_), {"self": name}, {"size": list(shape)}, (made,)))
        return made

    def _sum(self, masks: Sequence[str]) -> str:
        """What masks are together."""
        total = masks[0]
        for number, mask in enumerate(masks[1:], 2):
            shape = broadcast_shapes(self._spec(total).shape, self._spec(mask).shape)
            made = self._declare(f"{number} masks", shape, mask)
            self._nodes.append(OpNode(made, spelled(add), {"self": total, "other": mask}, {}, (made,)))
            total = made
        return total


WINDOWED = Rule(
    "attention by one kernel",
    tuple(
        pattern(windowed_attention, scaled=scaled, biased=biased, twice=twice, cast=cast)
        for twice, biased, scaled, cast in product((True, False), (True, False), _SCALED, (False, True))
    ),
    _under_the_view,
)
REPEATED_MASKS = Rule(
    "attention with masks that are not repeated",
    tuple(pattern(repeated_masks, biased=biased) for biased in (True, False)),
    _with_fewer_masks,
)


def fuse_windowed_attention(graph: IRGraph) -> IRGraph:
    """Replaces attention that is spelled out, and whose masks are added under another view of its scores.

    Where attention is one op already, its masks are not repeated for each image. This comes before what no input
    reaches is computed, so that a bias and a mask are added once, as few as they are.
    """
    return apply(apply(graph, WINDOWED), REPEATED_MASKS)


def attention_of_multiples(ops: Any, q: Any, k: Any, v: Any, mask: Any, factor: Any, *, viewed: bool) -> Any:
    """``attention(q * factor, k, v, mask)``."""
    multiples = ops.mul(q, factor)
    return ops.attention(ops.reshape(multiples) if viewed else multiples, k, v, mask)


def _scaling_more(site: Sequence[Match], scene: Scene) -> Replacement | str:
    (match,) = site
    query, factor, root = match.values["q"], match.values["factor"], match.root
    if not isinstance(query, str) or isinstance(factor, str) or not (isfinite(factor) and factor > 0):
        return ""
    given, made = (scene.graph.tensors[name] for name in (query, match.nodes[-1].outputs[0]))
    if (given.shape, given.dtype) != (made.shape, made.dtype):
        return ""
    nodes = [replace(node, inputs={**node.inputs, "self": query}) for node in match.nodes[1:-1]]
    inputs = root.inputs if nodes else {**root.inputs, "query": query}
    own = root.attrs.get("scale")
    scale = factor * (1 / sqrt(max(1, given.shape[-1])) if own is None else float(own))
    return Replacement((*nodes, replace(root, inputs=inputs, attrs={**root.attrs, "scale": scale})))


SCALED_SCORES = Rule(
    "attention that scales its scores",
    tuple(pattern(attention_of_multiples, ("mask",), viewed=viewed) for viewed in (False, True)),
    _scaling_more,
)


def leave_scales_to_scores(graph: IRGraph) -> IRGraph:
    """``attention(q * factor)`` becomes attention whose scores have that factor too, which costs it nothing."""
    return apply(graph, SCALED_SCORES)
