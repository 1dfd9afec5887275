"""The function behind a decode step that chooses the likeliest token: IR like a model's, compiled like one."""

from __future__ import annotations

from typing import Any

from npu_compiler.graph.ir_builder import IRBuilder, IRTensor

__all__ = ["NO_NUMBER", "next_token_ir", "next_tokens_ir"]

NO_NUMBER = -1  # chosen where the highest logit is NaN or infinite
_MAX_ROWS = 256


def next_token_ir(vocabulary: int, dtype: str, places: int) -> dict[str, Any]:
    """IR of the greedy choice; of equal logits it takes the first.

    The logits are looked at as a matrix, so that many threadgroups share the search: the highest of each row and where
    it comes first, then the highest of all rows.

    Its inputs are ``logits`` [1, 1, `vocabulary`], ``positions`` int64 [1] of the token that gave them, and ``chosen``
    int64 [`places`]. Its outputs are ``tokens`` int64 [1, 1], the token, or 0 for want of one, so that a step which
    runs ahead has a row to look up; ``next_positions`` int64 [1]; and ``all_chosen``, which takes the place of
    ``chosen``: at each position, the token that was chosen to follow, or `NO_NUMBER`.

    Args:
        vocabulary: How many logits there are.
        dtype: Data type of the logits.
        places: Positions that there are.
    """
    graph = IRBuilder()
    logits = graph.input("logits", (1, 1, vocabulary), dtype)
    positions = graph.input("positions", (1,), "int64")
    chosen = graph.input("chosen", (places,), "int64")
    choice = _likeliest(graph, logits)
    token = graph.add("clamp.default", "int64", (1, 1), choice, min=0, name="tokens")
    following = graph.add("add.Tensor", "int64", (1,), positions, other=1, name="next_positions")
    flat = graph.view(choice, (1,))
    written = graph.add("index_copy.default", "int64", (places,), chosen, positions, flat, dim=0, name="all_chosen")
    return graph.build("next_token", (token, following, written))


def next_tokens_ir(vocabulary: int, dtype: str, lanes: int) -> dict[str, Any]:
    """IR of the greedy choice for each of some lanes.

    Its input is ``logits`` [`lanes`, 1, `vocabulary`], its output ``chosen`` int64 [`lanes`, 1], with `NO_NUMBER` as in
    `next_token_ir`.

    Args:
        vocabulary: How many logits there are.
        dtype: Data type of the logits.
        lanes: How many lanes there are.
    """
    graph = IRBuilder()
    choice = _likeliest(graph, graph.input("logits", (lanes, 1, vocabulary), dtype))
    chosen = graph.add("view.default", "int64", (lanes, 1), choice, size=[lanes, 1], name="chosen")
    return graph.build("next_tokens", (chosen,))


def _likeliest(graph: IRBuilder, logits: IRTensor) -> IRTensor:
    """The likeliest token of each lane, or `NO_NUMBER`: int64 [lanes, 1, 1], but [1, 1] for a single lane."""
    lanes, _, vocabulary = logits["shape"]
    rows = max(count for count in range(1, _MAX_ROWS + 1) if vocabulary % count == 0)
    outer = (lanes,) if lanes > 1 else ()
    along, across = len(outer) + 1, len(outer)
    matrix = graph.view(logits, (*outer, rows, vocabulary // rows))
    highest = graph.reduce("amax.default", matrix, dim=along)
    columns = graph.arange(matrix["shape"][across:], vocabulary)
    equal = graph.compare("eq.Tensor", matrix["shape"], matrix, highest)
    first = graph.lowest_where(equal, columns, dim=along, none=vocabulary)
    best = graph.reduce("amax.default", highest, dim=across)
    equal = graph.compare("eq.Tensor", highest["shape"], highest, best)
    first = graph.lowest_where(equal, first, dim=across, none=vocabulary)
    difference = graph.same("sub.Tensor", best, best)  # NaN for NaN and for infinity
    is_number = graph.compare("eq.Scalar", best["shape"], difference, other=0)
    return graph.add("where.self", "int64", best["shape"], is_number, first, graph.full(NO_NUMBER, best["shape"]))
