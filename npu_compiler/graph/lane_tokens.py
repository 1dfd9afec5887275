"""The functions that choose the tokens of a batch: IR like a model's, compiled like one.

They work on rows, not on lanes: a row of logits, and for whom and for which place of a text it chooses. A guess of
several tokens of one text is so many rows of its lane.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from math import prod
from typing import Any

from npu_compiler.graph.ir_builder import IRBuilder, IRTensor
from npu_compiler.integers import ceil_div

__all__ = ["IN_PROMPT", "MASK_BITS", "MOST_BEST", "OF_TEXT", "Feature"]
__all__ += ["lane_row_ir", "lane_tokens_ir", "token_scores_ir"]

MASK_BITS = 32  # tokens of a word of a mask
MOST_BEST = 20  # likeliest tokens that come back
IN_PROMPT, OF_TEXT = 1, 2  # a count of a token: what one of the prompt sets, and what each one of the text adds
_LATEST = ("latest", "int64"), ("latest_counts", "int32")
_MOST_PARTS = 256  # of a row, whose highest logits are looked for by threads of their own


class Feature(StrEnum):
    """What a choice may have to do beyond taking the highest logit; a function does what some row of a batch needs."""

    DRAWN = "drawn"
    BIAS = "bias"
    MASK = "mask"
    PENALTIES = "penalties"
    BEST = "best"


def lane_tokens_ir(shape: Sequence[int], dtype: str, lanes: int, features: Collection[Feature]) -> dict[str, Any]:
    """IR of the choice of a token for each row of logits, in the order that `LaneSampling` says.

    Its inputs are ``logits`` [`shape`], R rows of V, and ``rows`` int64 [R, 2]: the lane of each and the position of
    the token that it chooses. By features:

    - DRAWN: ``limits`` float32 [L, 3] and ``top_k`` int64 [L] as `npu_tokens.draw` takes them, ``seeds`` int64 [L];
    - BIAS: ``bias`` float32 [L, V];
    - MASK: ``masks`` int32 [R, ceil(V / 32)], tokens that may be chosen, bit v % 32 of word v // 32;
    - PENALTIES: ``penalties`` float32 [L, 3], for repetition, presence and frequency; ``counts`` int32 [L * V]:
      `IN_PROMPT` for tokens of the prompt, and `OF_TEXT` for each time that the text has them; ``latest`` int64 [R]
      and ``latest_counts`` int32 [R]: the last token of each row's text, and its count, which is entered first.

    Its outputs are ``tokens`` int64 [R], -1 where the highest logit is no finite number; with PENALTIES
    ``all_counts``, which takes the place of ``counts``; with BEST what `token_scores_ir` gives for the tokens. Logits,
    weights and biases are computed with in float32.

    Args:
        shape: Of the logits, V last.
        dtype: Data type of the logits.
        lanes: L.
        features: What some row asks for.
    """
    graph = IRBuilder()
    *leading, vocabulary = shape
    rows = prod(leading)
    logits = graph.view(graph.input("logits", shape, dtype), (rows, vocabulary))
    pairs = graph.input("rows", (rows, 2), "int64")
    lane, position = (_column(graph, pairs, number) for number in range(2))
    counts = _counts(graph, lane, lanes, vocabulary) if Feature.PENALTIES in features else None
    adjusted = _adjusted(graph, logits, lane, lanes, counts, features)
    if Feature.DRAWN in features:
        limits = _of_lanes(graph, graph.input("limits", (lanes, 3), "float32"), lane)
        top_k = _of_lanes(graph, graph.input("top_k", (lanes,), "int64"), lane)
        seeds = graph.input("seeds", (lanes,), "int64")
        words = graph.add("npu_tokens.random_words.default", "int64", (rows, 2), seeds, lane, position)
        tokens = graph.add("npu_tokens.draw.default", "int64", (rows,), adjusted, limits, top_k, words, name="tokens")
    else:
        tokens = _highest(graph, adjusted)
    outputs = [tokens] if counts is None else [tokens, counts]
    if Feature.BEST in features:
        outputs += _scores(graph, logits, graph.same("clamp_min.default", tokens, min=0))
    return graph.build("lane_tokens", outputs, compute_dtype=_compute(dtype))


def token_scores_ir(shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """IR of how probable given tokens are by the model's own logits, and which are the likeliest.

    Its inputs are ``logits`` [`shape`], R rows of V, and ``given`` int64 [R]. Its outputs are ``logprobs`` float32 [R],
    the natural logarithms of their probabilities; ``best`` int64 [R, K], the likeliest tokens, likeliest first, of
    equal ones the first before the others; and ``best_logprobs`` float32 [R, K]. K is `MOST_BEST`, or V if less.

    Args:
        shape: Of the logits, V last.
        dtype: Data type of the logits.
    """
    graph = IRBuilder()
    *leading, vocabulary = shape
    rows = prod(leading)
    logits = graph.view(graph.input("logits", shape, dtype), (rows, vocabulary))
    given = graph.input("given", (rows,), "int64")
    return graph.build("token_scores", _scores(graph, logits, given), compute_dtype=_compute(dtype))


def lane_row_ir(lanes: int, vocabulary: int, dtype: str) -> dict[str, Any]:
    """IR that gives one lane another row of `bias` or `counts`.

    Its inputs are ``all`` [L, V], ``lane`` int64 [1] and ``row`` [1, V]. Its output ``updated`` takes the place of
    ``all``.

    Args:
        lanes: L.
        vocabulary: V.
        dtype: Data type of the rows.
    """
    graph = IRBuilder()
    every = graph.input("all", (lanes, vocabulary), dtype)
    lane, row = graph.input("lane", (1,), "int64"), graph.input("row", (1, vocabulary), dtype)
    updated = graph.add("index_copy.default", dtype, every["shape"], every, lane, row, dim=0, name="updated")
    return graph.build("lane_row", (updated,), compute_dtype=_compute(dtype))


def _compute(dtype: str) -> str:
    """What half-precision tensors are computed in; float32 stays what it is."""
    return dtype if dtype in ("float16", "bfloat16") else "bfloat16"


def _column(graph: IRBuilder, pairs: IRTensor, number: int) -> IRTensor:
    count, _ = pairs["shape"]
    taken = graph.add("slice.Tensor", "int64", (count, 1), pairs, dim=1, start=number, end=number + 1)
    return graph.view(taken, (count,))


def _of_lanes(graph: IRBuilder, each: IRTensor, lane: IRTensor) -> IRTensor:
    """Those of the lanes of rows."""
    shape = (*lane["shape"], *each["shape"][1:])
    return graph.add("index_select.default", each["dtype"], shape, each, lane, dim=0)


def _wide(graph: IRBuilder, tensor: IRTensor) -> IRTensor:
    if tensor["dtype"] == "float32":
        return tensor
    return graph.add("type_as.default", "float32", tensor["shape"], tensor, graph.full(0.0, (1,), "float32"))


def _adjusted(
    graph: IRBuilder,
    logits: IRTensor,
    lane: IRTensor,
    lanes: int,
    counts: IRTensor | None,
    features: Collection[Feature],
) -> IRTensor:
    """Logits with bias, mask and penalties; as they are where none is asked for."""
    rows, vocabulary = logits["shape"]
    if Feature.BIAS in features:
        bias = graph.input("bias", (lanes, vocabulary), "float32")
        logits = graph.same("add.Tensor", _wide(graph, logits), _of_lanes(graph, bias, lane))
    if Feature.MASK in features:
        words = graph.input("masks", (rows, ceil_div(vocabulary, MASK_BITS)), "int32")
        logits = graph.add("npu_tokens.allow.default", "float32", logits["shape"], logits, words)
    if counts is not None:
        penalties = _of_lanes(graph, graph.input("penalties", (lanes, 3), "float32"), lane)
        counted = _of_lanes(graph, graph.view(counts, (lanes, vocabulary)), lane)
        logits = graph.add("npu_tokens.penalise.default", "float32", logits["shape"], logits, counted, penalties)
    return logits


def _highest(graph: IRBuilder, logits: IRTensor) -> IRTensor:
    """The first of the highest logits of each row; -1 where that is no finite number.

    As in `next_token_ir`, rows are looked at as matrices.
    """
    rows, vocabulary = logits["shape"]
    parts = max(count for count in range(1, _MOST_PARTS + 1) if vocabulary % count == 0)
    shape = (rows, parts, vocabulary // parts)
    matrix = graph.view(logits, shape)
    highest = graph.reduce("amax.default", matrix, dim=2)
    columns = graph.arange((1, *shape[1:]), vocabulary)
    equal = graph.compare("eq.Tensor", shape, matrix, highest)
    first = graph.lowest_where(equal, columns, dim=2, none=vocabulary)
    best = graph.reduce("amax.default", highest, dim=1)
    equal = graph.compare("eq.Tensor", highest["shape"], highest, best)
    first = graph.lowest_where(equal, first, dim=1, none=vocabulary)
    difference = graph.same("sub.Tensor", best, best)  # NaN for NaN and for infinity
    is_number = graph.compare("eq.Scalar", best["shape"], difference, other=0)
    token = graph.add("where.self", "int64", best["shape"], is_number, first, graph.full(-1, best["shape"]))
    return graph.add("view.default", "int64", (rows,), token, size=[rows], name="tokens")


def _counts(graph: IRBuilder, lane: IRTensor, lanes: int, vocabulary: int) -> IRTensor:
    """The counts of all lanes, those of the latest tokens entered."""
    latest, number = (graph.input(name, lane["shape"], kind) for name, kind in _LATEST)
    counts = graph.input("counts", (lanes * vocabulary,), "int32")
    place = graph.same("add.Tensor", graph.same("mul.Scalar", lane, other=vocabulary), latest)
    return graph.add("index_copy.default", "int32", counts["shape"], counts, place, number, dim=0, name="all_counts")


def _scores(graph: IRBuilder, logits: IRTensor, tokens: IRTensor) -> list[IRTensor]:
    rows, vocabulary = logits["shape"]
    count = min(MOST_BEST, vocabulary)
    parts = max(number for number in range(1, _MOST_PARTS + 1) if vocabulary % number == 0)
    wide = _wide(graph, logits)
    matrix = graph.view(wide, (rows, parts, vocabulary // parts))
    each = graph.add("logsumexp.default", "float32", (rows, parts), matrix, dim=[2], keepdim=False)
    whole = graph.add("logsumexp.default", "float32", (rows, 1), each, dim=[1], keepdim=True)
    at = graph.view(tokens, (rows, 1))
    own = graph.add("gather.default", logits["dtype"], (rows, 1), logits, at, dim=1)
    score = graph.same("sub.Tensor", _wide(graph, own), whole)
    best, places = (
        {"name": name, "shape": [rows, count], "dtype": kind}
        for name, kind in (("highest_logits", logits["dtype"]), ("best", "int64"))
    )
    graph.add_all("topk.default", (best, places), logits, k=count, dim=1)
    scores = graph.same("sub.Tensor", _wide(graph, best), whole, name="best_logprobs")
    return [graph.add("view.default", "float32", (rows,), score, size=[rows], name="logprobs"), places, scores]
