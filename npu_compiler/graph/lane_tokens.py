"""The functions that choose the tokens of a batch: IR like a model's, compiled like one.

They work on rows, not on lanes: a row of logits, and for whom and for which place of a text it chooses. A guess of
several tokens of one text is so many rows of its lane.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from enum import StrEnum
from math import prod
from typing import Any

from npu_compiler.graph.ir_builder import IRBuilder, IRTensor
from npu_compiler.integers import ceil_div

__all__ = ["IN_PROMPT", "MASK_BITS", "MOST_BEST", "OF_TEXT", "Feature"]
__all__ += ["lane_row_ir", "lane_rows_ir", "lane_tokens_ir", "token_scores_ir"]

MASK_BITS = 32  # tokens of a word of a mask
MOST_BEST = 20  # likeliest tokens that come back
IN_PROMPT, OF_TEXT = 1, 2  # a count of a token: what one of the prompt sets, and what each one of the text adds
_CHUNK = 8  # neighbours that are read together
_MOST_PARTS = 256  # of a row, whose highest logits are looked for by threads of their own


class Feature(StrEnum):
    """What a choice may have to do beyond taking the highest logit; a function does what some row of a batch needs."""

    DRAWN = "drawn"
    BIAS = "bias"
    MASK = "mask"
    PENALTIES = "penalties"
    BEST = "best"


def lane_rows_ir(rows: int, lanes: int, features: Set[Feature]) -> dict[str, Any]:
    """IR of what `lane_tokens_ir` is to know of its rows, from what the host writes; in memory that both may see.

    Its inputs are ``rows`` int64 [R, 2]: the lane of each and the position of the token that it chooses. With DRAWN:
    ``all_limits`` float32 [L, 3] and ``all_top_k`` int64 [L] as `npu_tokens.draw` takes them, ``all_seeds`` int64 [L].
    With PENALTIES: ``all_penalties`` float32 [L, 3], for repetition, presence and frequency; and the ``last`` token of
    each row's text int64 [R] with its count ``last_counts`` int32 [R].

    Its outputs are inputs of `lane_tokens_ir`; there are none, and so no such function, where `features` asks for none
    of DRAWN, BIAS and PENALTIES.

    Args:
        rows: R.
        lanes: L.
        features: As for `lane_tokens_ir`.
    """
    graph, outputs = IRBuilder(), []
    pairs = graph.input("rows", (rows, 2), "int64")
    lane, position = (_column(graph, pairs, number) for number in range(2))

    def taken(name: str, kind: str, *shape: int) -> None:
        every = graph.input(f"all_{name}", (lanes, *shape), kind)
        outputs.append(graph.add("index_select.default", kind, (rows, *shape), every, lane, dim=0, name=name))

    if Feature.DRAWN in features:
        taken("limits", "float32", 3)
        taken("top_k", "int64")
        seeds = graph.input("all_seeds", (lanes,), "int64")
        words = graph.add("npu_tokens.random_words.default", "int64", (rows, 2), seeds, lane, position, name="words")
        outputs.append(words)
    if Feature.PENALTIES in features:
        taken("penalties", "float32", 3)
        last = [graph.input(*each) for each in (("last", (rows,), "int64"), ("last_counts", (rows,), "int32"))]
        outputs += [graph.same("clone.default", each, name=f"row_{each['name']}") for each in last]
    if features & {Feature.BIAS, Feature.PENALTIES}:
        outputs.append(graph.same("clone.default", lane, name="row_lanes"))
    return graph.build("lane_rows", outputs, compute_dtype=_compute(""))


def lane_tokens_ir(shape: Sequence[int], dtype: str, lanes: int, features: Set[Feature]) -> dict[str, Any]:
    """IR of the choice of a token for each row of logits, in the order that `LaneSampling` says.

    Its inputs are ``logits`` [`shape`], R rows of V, and by features:

    - DRAWN: ``limits`` float32 [R, 3], ``top_k`` int64 [R] and ``words`` int64 [R, 2] as `npu_tokens.draw` takes them;
    - BIAS: ``bias`` float32 [L, V];
    - MASK: ``masks`` int32 [R, ceil(V / 32)], tokens that may be chosen, bit v % 32 of word v // 32;
    - PENALTIES: ``penalties`` float32 [R, 3], for repetition, presence and frequency; ``counts`` int32 [L * V]:
      `IN_PROMPT` for tokens of the prompt, and `OF_TEXT` for each time that the text has them; ``row_last`` int64 [R]
      and ``row_last_counts`` int32 [R]: the last token of each row's text, and its count, which is entered first;
    - BIAS or PENALTIES: ``row_lanes`` int64 [R], the lane of each row.

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
    adjusted, counts = _adjusted(graph, logits, lanes, features)
    if Feature.DRAWN in features:
        settings = (("limits", (rows, 3), "float32"), ("top_k", (rows,), "int64"), ("words", (rows, 2), "int64"))
        given = [graph.input(*each) for each in settings]
        tokens = graph.add("npu_tokens.draw.default", "int64", (rows,), adjusted, *given, name="tokens")
    else:
        tokens = _highest(graph, adjusted)
    outputs = [tokens, *counts]
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


def _parts(vocabulary: int) -> int:
    """Into how many equal parts a row is divided, so that threads of their own walk over them by whole chunks."""
    chunk = _CHUNK if vocabulary % _CHUNK == 0 else 1
    return max(count for count in range(1, _MOST_PARTS + 1) if vocabulary // chunk % count == 0)


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
    graph: IRBuilder, logits: IRTensor, lanes: int, features: Set[Feature]
) -> tuple[IRTensor, list[IRTensor]]:
    """Logits with bias, mask and penalties, as they are where none is asked for; and all counts, if there are any."""
    (rows, vocabulary), counts = logits["shape"], []
    lane = graph.input("row_lanes", (rows,), "int64") if features & {Feature.BIAS, Feature.PENALTIES} else {}
    if Feature.BIAS in features:
        bias = graph.input("bias", (lanes, vocabulary), "float32")
        logits = graph.same("add.Tensor", _wide(graph, logits), _of_lanes(graph, bias, lane))
    if Feature.MASK in features:
        words = graph.input("masks", (rows, ceil_div(vocabulary, MASK_BITS)), "int32")
        logits = graph.add("npu_tokens.allow.default", "float32", logits["shape"], logits, words)
    if Feature.PENALTIES in features:
        counts = [_counts(graph, lane, lanes, vocabulary)]
        counted = _of_lanes(graph, graph.view(counts[0], (lanes, vocabulary)), lane)
        penalties = graph.input("penalties", (rows, 3), "float32")
        logits = graph.add("npu_tokens.penalise.default", "float32", logits["shape"], logits, counted, penalties)
    return logits, counts


def _highest(graph: IRBuilder, logits: IRTensor) -> IRTensor:
    """The first of the highest logits of each row; -1 where that is no finite number.

    As in `next_token_ir`, rows are looked at as matrices.
    """
    rows, vocabulary = logits["shape"]
    parts = _parts(vocabulary)
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
    """The counts of all lanes, those of the last tokens entered."""
    last = graph.input("row_last", lane["shape"], "int64")
    number = graph.input("row_last_counts", lane["shape"], "int32")
    counts = graph.input("counts", (lanes * vocabulary,), "int32")
    place = graph.same("add.Tensor", graph.same("mul.Scalar", lane, other=vocabulary), last)
    return graph.add("index_copy.default", "int32", counts["shape"], counts, place, number, dim=0, name="all_counts")


def _scores(graph: IRBuilder, logits: IRTensor, tokens: IRTensor) -> list[IRTensor]:
    rows, vocabulary = logits["shape"]
    count = min(MOST_BEST, vocabulary)
    parts = _parts(vocabulary)
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
