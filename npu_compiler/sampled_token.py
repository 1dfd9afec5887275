"""The function behind a decode step that draws the next token at random: IR like a model's, compiled like one."""

from __future__ import annotations

from math import isqrt
from typing import Any, Literal

from npu_compiler.ir_builder import IRBuilder, IRTensor
from npu_compiler.next_token import NO_NUMBER

__all__ = ["SLOTS", "UNDECIDED", "Limit", "as_matrix", "sampled_token_ir"]

SLOTS = 8  # rows of random numbers: for so many positions they are known at a time
UNDECIDED = -2  # chosen where the limit allows none of the drawn tokens

Limit = Literal["", "top_k", "top_p"]
"""What a drawn token is held against: nothing, how many tokens are likelier, or how likely they are together."""


def as_matrix(vocabulary: int) -> tuple[int, int]:
    """Rows and columns in which the tokens are looked at in their order; places behind the last one are empty."""
    columns = isqrt(vocabulary - 1) + 1
    return -(-vocabulary // columns), columns


def sampled_token_ir(vocabulary: int, dtype: str, places: int, tries: int, limit: Limit) -> dict[str, Any]:
    """IR of a random choice that is exact without sorting.

    Several tokens are drawn from the whole distribution, each by two random numbers: one for the row of the matrix
    (`as_matrix`), one for the column, each looked up in sums of probabilities. The first drawn token that the limit
    allows is chosen (rejection sampling: von Neumann, "Various Techniques Used in Connection with Random Digits",
    1951): the probability, or the number, of the tokens that are likelier than it, and of those as likely before it,
    is below the bound.

    Its inputs are ``logits`` [1, 1, `vocabulary`]; ``positions`` int64 [1] of the token that gave them; ``chosen``
    int64 [`places`]; ``inverse_temperature`` float32 [1]; ``draws`` float32 [`SLOTS`, `tries` + 1, 2], random numbers
    from 0 to below 1, for row and column, of which those at the position modulo `SLOTS` count, but for the last pair;
    and with a limit ``bound`` float32 [1], the share of the whole probability or the number of tokens. Its outputs are
    ``tokens`` int64 [1, 1], 0 where no token was chosen; ``next_positions`` int64 [1]; and ``all_chosen``, which takes
    the place of ``chosen``: at each position, the token that was chosen to follow, `UNDECIDED` or `NO_NUMBER`.

    Args:
        vocabulary: How many logits there are.
        dtype: Data type of the logits.
        places: Positions that there are.
        tries: How many tokens are drawn.
        limit: What they are held against.
    """
    rows, columns = as_matrix(vocabulary)
    graph = IRBuilder()
    logits = graph.input("logits", (1, 1, vocabulary), dtype)
    positions = graph.input("positions", (1,), "int64")
    chosen = graph.input("chosen", (places,), "int64")
    inverse = graph.input("inverse_temperature", (1,), "float32")
    draws = graph.input("draws", (SLOTS, tries + 1, 2), "float32")

    padded = _padded(graph, graph.view(logits, (vocabulary,)), rows * columns)
    matrix = graph.view(padded, (rows, columns))
    best = graph.reduce("amax.default", graph.reduce("amax.default", matrix, dim=1), dim=0)
    weights = _weights(graph, matrix, best, inverse)
    reached = _running_sums(graph, graph.view(graph.reduce("sum.dim_IntList", weights, dim=1), (1, rows)))
    slot = graph.same("bitwise_and.Scalar", positions, other=SLOTS - 1)
    row_draws, column_draws = _pairs(graph, draws, slot, tries)
    row = _draw(graph, reached, row_draws)
    of_row = graph.add("index_select.default", "float32", (tries, columns), weights, row, dim=0)
    column = _draw(graph, _running_sums(graph, of_row), column_draws)
    drawn = graph.same("add.Tensor", graph.same("mul.Scalar", row, other=columns), column)

    number = graph.arange((tries, 1), tries)
    if limit:
        bound = graph.input("bound", (1,), "float32")
        before = _before(graph, drawn, padded, weights, (rows, columns), limit)
        if limit == "top_p":
            total = graph.add("slice.Tensor", "float32", (1, 1), reached, dim=1, start=rows - 1, end=rows)
            bound = graph.same("mul.Tensor", total, bound)
        allowed = graph.compare("lt.Tensor", (tries, 1), before, bound)
        first = graph.lowest_where(allowed, number, dim=0, none=tries)
        is_first = graph.compare("eq.Tensor", (tries, 1), number, first)
        found = graph.lowest_where(is_first, graph.view(drawn, (tries, 1)), dim=0, none=rows * columns)
        is_found = graph.compare("lt.Scalar", (1, 1), found, other=rows * columns)
        found = graph.add("where.self", "int64", (1, 1), is_found, found, graph.full(UNDECIDED, (1, 1)))
    else:
        found = graph.view(drawn, (1, 1))
    is_number = graph.compare("eq.Scalar", (1, 1), graph.same("sub.Tensor", best, best), other=0)  # NaN: infinity too
    found = graph.add("where.self", "int64", (1, 1), is_number, found, graph.full(NO_NUMBER, (1, 1)))
    token = graph.add("clamp_min.default", "int64", (1, 1), found, min=0, name="tokens")
    following = graph.add("add.Tensor", "int64", (1,), positions, other=1, name="next_positions")
    flat = graph.view(found, (1,))
    written = graph.add("index_copy.default", "int64", (places,), chosen, positions, flat, dim=0, name="all_chosen")
    return graph.build("sampled_token", (token, following, written), compute_dtype=dtype)


def _padded(graph: IRBuilder, logits: IRTensor, count: int) -> IRTensor:
    """`count` logits, those behind the last as of impossible tokens."""
    behind = count - logits["shape"][0]
    if not behind:
        return logits
    return graph.add("constant_pad_nd.default", logits["dtype"], (count,), logits, pad=[0, behind], value=float("-inf"))


def _weights(graph: IRBuilder, logits: IRTensor, best: IRTensor, inverse: IRTensor) -> IRTensor:
    """How probable tokens are, relative to the best: float32."""
    wide, highest = (graph.add("type_as.default", "float32", each["shape"], each, inverse) for each in (logits, best))
    below = graph.same("sub.Tensor", wide, highest)
    return graph.same("exp.default", graph.same("mul.Tensor", below, inverse))


def _running_sums(graph: IRBuilder, values: IRTensor) -> IRTensor:
    """Along the last of two dimensions.

    Each sum is one of all places, of which those behind are zero: rounded in the same order, it is never below the sum
    before, and equals it where its own value is zero.
    """
    count, size = values["shape"]
    shape = (count, size, size)
    place, end = graph.arange((1, 1, size), size), graph.arange((1, size, 1), size)
    is_inside = graph.compare("le.Tensor", (1, size, size), place, end)
    kept = graph.add("where.self", "float32", shape, is_inside, graph.view(values, (count, 1, size)), _zero(graph))
    return graph.view(graph.reduce("sum.dim_IntList", kept, dim=2), (count, size))


def _zero(graph: IRBuilder) -> IRTensor:
    return graph.full(0.0, (1,), "float32")


def _pairs(graph: IRBuilder, draws: IRTensor, slot: IRTensor, tries: int) -> tuple[IRTensor, IRTensor]:
    """The random numbers [tries, 1] for rows, and those for columns."""
    _, numbers, _ = draws["shape"]
    of_slot = graph.add("index_select.default", "float32", (1, numbers, 2), draws, slot, dim=0)
    used = graph.add("slice.Tensor", "float32", (1, tries, 2), of_slot, dim=1, start=0, end=tries)
    both = (graph.add("slice.Tensor", "float32", (1, tries, 1), used, dim=2, start=i, end=i + 1) for i in range(2))
    row, column = (graph.view(each, (tries, 1)) for each in both)
    return row, column


def _draw(graph: IRBuilder, reached: IRTensor, draws: IRTensor) -> IRTensor:
    """The first place [tries] whose running sum is above the share that was drawn; never one of no probability."""
    count, size = reached["shape"]
    tries, _ = draws["shape"]
    whole = graph.add("slice.Tensor", "float32", (count, 1), reached, dim=1, start=size - 1, end=size)
    share = graph.same("mul.Tensor", draws, whole)
    passed = graph.compare("le.Tensor", (tries, size), reached, share)
    is_not_last = graph.compare("lt.Tensor", (count, size), reached, whole)
    behind = graph.compare("logical_and.default", (tries, size), passed, is_not_last)
    return graph.view(graph.add("sum.dim_IntList", "int64", (tries, 1), behind, dim=[1], keepdim=True), (tries,))


def _before(
    graph: IRBuilder, drawn: IRTensor, padded: IRTensor, weights: IRTensor, matrix: tuple[int, int], limit: Limit
) -> IRTensor:
    """The probability, or the number, of what comes before each drawn token: float32 [tries, 1]."""
    (tries,), (rows, columns) = drawn["shape"], matrix
    one, whole = (1, rows, columns), (tries, rows, columns)
    logits, places = graph.view(padded, one), graph.arange(one, rows * columns)
    own = graph.add("index_select.default", padded["dtype"], (tries,), padded, drawn, dim=0)
    likelier = graph.compare("gt.Tensor", whole, logits, graph.view(own, (tries, 1, 1)))
    equal = graph.compare("eq.Tensor", whole, logits, graph.view(own, (tries, 1, 1)))
    sooner = graph.compare("lt.Tensor", whole, places, graph.view(drawn, (tries, 1, 1)))
    sooner = graph.compare("logical_and.default", whole, equal, sooner)
    before = graph.compare("logical_or.default", whole, likelier, sooner)
    counted = graph.view(weights, one) if limit == "top_p" else graph.full(1.0, (1,), "float32")
    kept = graph.add("where.self", "float32", whole, before, counted, _zero(graph))
    sums = graph.reduce("sum.dim_IntList", graph.reduce("sum.dim_IntList", kept, dim=2), dim=1)
    return graph.view(sums, (tries, 1))
