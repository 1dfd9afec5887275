"""The function behind a decode step that chooses the next token: IR like a model's, compiled like one."""

from __future__ import annotations

from typing import Any

from npu_compiler.graph.ir_builder import IRBuilder, IRTensor

__all__ = ["NO_NUMBER", "next_token_ir"]

NO_NUMBER = -1  # chosen where the highest logit is NaN or infinite
_MAX_ROWS = 256


def next_token_ir(vocabulary: int, dtype: str, places: int, drawn: bool = False) -> dict[str, Any]:
    """IR of the choice of a token: the one with the highest logit, the first of equals, or one drawn by probability.

    Its inputs are ``logits`` [1, 1, `vocabulary`], ``positions`` int64 [1] of the token that gave them, and ``chosen``
    int64 [`places`]; where it draws also ``limits`` float32 [1, 3] and ``top_k`` int64 [1], as `npu_tokens.draw` takes
    them, and ``seeds`` int64 [1], of the random words of the position behind. Its outputs are ``tokens`` int64 [1, 1],
    the token, or 0 for want of one, so that a step which runs ahead has a row to look up; ``next_positions`` int64 [1];
    and ``all_chosen``, which takes the place of ``chosen``: at each position, the token that was chosen to follow, or
    `NO_NUMBER`.

    Args:
        vocabulary: How many logits there are.
        dtype: Data type of the logits.
        places: Positions that there are.
        drawn: Whether it draws.
    """
    graph = IRBuilder()
    logits = graph.input("logits", (1, 1, vocabulary), dtype)
    positions = graph.input("positions", (1,), "int64")
    chosen = graph.input("chosen", (places,), "int64")
    following = graph.add("add.Tensor", "int64", (1,), positions, other=1, name="next_positions")
    choice = _drawn(graph, logits, following) if drawn else _highest(graph, logits)
    token = graph.add("clamp.default", "int64", (1, 1), choice, min=0, name="tokens")
    flat = graph.view(choice, (1,))
    written = graph.add("index_copy.default", "int64", (places,), chosen, positions, flat, dim=0, name="all_chosen")
    return graph.build("next_token", (token, following, written), compute_dtype=dtype)


def _highest(graph: IRBuilder, logits: IRTensor) -> IRTensor:
    """The first of the highest: int64 [1, 1].

    The logits are looked at as a matrix, so that many threadgroups share the search: the highest of each row and where
    it comes first, then the highest of all rows.
    """
    vocabulary = logits["shape"][-1]
    rows = max(count for count in range(1, _MAX_ROWS + 1) if vocabulary % count == 0)
    matrix = graph.view(logits, (rows, vocabulary // rows))
    highest = graph.reduce("amax.default", matrix, dim=1)
    columns = graph.arange(matrix["shape"], vocabulary)
    equal = graph.compare("eq.Tensor", matrix["shape"], matrix, highest)
    first = graph.lowest_where(equal, columns, dim=1, none=vocabulary)
    best = graph.reduce("amax.default", highest, dim=0)
    equal = graph.compare("eq.Tensor", highest["shape"], highest, best)
    first = graph.lowest_where(equal, first, dim=0, none=vocabulary)
    difference = graph.same("sub.Tensor", best, best)  # NaN for NaN and for infinity
    is_number = graph.compare("eq.Scalar", (1, 1), difference, other=0)
    return graph.add("where.self", "int64", (1, 1), is_number, first, graph.full(NO_NUMBER, (1, 1)))


def _drawn(graph: IRBuilder, logits: IRTensor, position: IRTensor) -> IRTensor:
    """A token for a position, drawn by probability: int64 [1, 1]."""
    limits, top_k = graph.input("limits", (1, 3), "float32"), graph.input("top_k", (1,), "int64")
    owner = graph.input("seeds", (1,), "int64"), graph.arange((1,), 1)
    words = graph.add("npu_tokens.random_words.default", "int64", (1, 2), *owner, position)
    row = graph.view(logits, (1, logits["shape"][-1]))
    return graph.view(graph.add("npu_tokens.draw.default", "int64", (1,), row, limits, top_k, words), (1, 1))
