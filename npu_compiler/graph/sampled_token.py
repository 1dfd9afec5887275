"""The function behind a decode step that draws the next token at random: IR like a model's, compiled like one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from npu_compiler.graph.ir_builder import IRBuilder, IRTensor
from npu_compiler.graph.next_token import NO_NUMBER
from npu_compiler.graph.token_matrix import as_matrix, padded_logits, relative_weights

__all__ = ["PIVOTS", "SLOTS", "UNDECIDED", "sampled_token_ir"]

PIVOTS = 64  # tokens by which the probability of the likeliest together is found; `top_k` up to here
SLOTS = 8  # rows of random numbers: for so many positions they are known at a time
UNDECIDED = -2  # chosen where the limits allow none of the drawn tokens, or it cannot be told which


def sampled_token_ir(vocabulary: int, dtype: str, places: int, tries: int, limits: Sequence[str]) -> dict[str, Any]:
    """IR of a random choice that is exact without sorting.

    Several tokens are drawn from the whole distribution, each by two random numbers: one for the row of the matrix
    (`as_matrix`), one for the column, each looked up in sums of probabilities. The first drawn token that the limits
    allow is chosen (rejection sampling: von Neumann, "Various Techniques Used in Connection with Random Digits", 1951):
    of the tokens that are likelier than it, and those as likely before it, there are fewer than ``top_k``, and they are
    together less probable than the share ``top_p`` of all tokens, or of the ``top_k`` likeliest with both limits. How
    probable these are is found by the highest logits of the rows, of which some are among them and others are not;
    mostly one is the last of them.

    Its inputs are ``logits`` [1, 1, `vocabulary`]; ``positions`` int64 [1] of the token that gave them; ``chosen``
    int64 [`places`]; ``inverse_temperature`` float32 [1]; ``draws`` float32 [`SLOTS`, `tries` + 1, 2], random numbers
    from 0 to below 1, for row and column, of which those at the position modulo `SLOTS` count, but for the last pair;
    and each limit, float32 [1]. Its outputs are ``tokens`` int64 [1, 1], 0 where no token was chosen;
    ``next_positions`` int64 [1]; and ``all_chosen``, which takes the place of ``chosen``: at each position, the token
    that was chosen to follow, `UNDECIDED` or `NO_NUMBER`.

    Args:
        vocabulary: How many logits there are.
        dtype: Data type of the logits.
        places: Positions that there are.
        tries: How many tokens are drawn.
        limits: ``top_k``, ``top_p``, both or none.
    """
    rows, columns = as_matrix(vocabulary)
    graph = IRBuilder()
    logits = graph.input("logits", (1, 1, vocabulary), dtype)
    positions = graph.input("positions", (1,), "int64")
    chosen = graph.input("chosen", (places,), "int64")
    inverse = graph.input("inverse_temperature", (1,), "float32")
    draws = graph.input("draws", (SLOTS, tries + 1, 2), "float32")
    bounds = {limit: graph.input(limit, (1,), "float32") for limit in limits}

    padded = padded_logits(graph, graph.view(logits, (vocabulary,)), rows * columns)
    matrix = graph.view(padded, (rows, columns))
    highest = graph.reduce("amax.default", matrix, dim=1)
    best = graph.reduce("amax.default", highest, dim=0)
    weights = relative_weights(graph, matrix, best, inverse)
    reached = _running_sums(graph, graph.view(graph.reduce("sum.dim_IntList", weights, dim=1), (1, rows)))
    slot = graph.same("bitwise_and.Scalar", positions, other=SLOTS - 1)
    row_draws, column_draws = _pairs(graph, draws, slot, tries)
    row = _draw(graph, reached, row_draws)
    of_row = graph.add("index_select.default", "float32", (tries, columns), weights, row, dim=0)
    column = _draw(graph, _running_sums(graph, of_row), column_draws)
    drawn = graph.same("add.Tensor", graph.same("mul.Scalar", row, other=columns), column)

    if limits:
        total = graph.add("slice.Tensor", "float32", (1, 1), reached, dim=1, start=rows - 1, end=rows)
        found = _first_allowed(_Tokens(graph, padded, highest, weights, total), drawn, bounds)
    else:
        found = graph.view(drawn, (1, 1))
    is_number = graph.compare("eq.Scalar", (1, 1), graph.same("sub.Tensor", best, best), other=0)  # NaN: infinity too
    found = graph.add("where.self", "int64", (1, 1), is_number, found, graph.full(NO_NUMBER, (1, 1)))
    token = graph.add("clamp_min.default", "int64", (1, 1), found, min=0, name="tokens")
    following = graph.add("add.Tensor", "int64", (1,), positions, other=1, name="next_positions")
    flat = graph.view(found, (1,))
    written = graph.add("index_copy.default", "int64", (places,), chosen, positions, flat, dim=0, name="all_chosen")
    return graph.build("sampled_token", (token, following, written), compute_dtype=dtype)


class _Tokens(NamedTuple):
    """All tokens.

    Attributes:
        graph: The IR under construction.
        logits: [N], padded.
        highest: The highest logit of each row [rows, 1].
        weights: Probabilities relative to the best [rows, columns], float32.
        total: Their sum [1, 1].
    """

    graph: IRBuilder
    logits: IRTensor
    highest: IRTensor
    weights: IRTensor
    total: IRTensor


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


def _first_allowed(tokens: _Tokens, drawn: IRTensor, bounds: dict[str, IRTensor]) -> IRTensor:
    """The first drawn token that the limits allow, or `UNDECIDED`: int64 [1, 1]."""
    graph, (tries,), (count,) = tokens.graph, drawn["shape"], tokens.logits["shape"]
    number = graph.arange((tries, 1), tries)
    allowed, is_open = _allowed(tokens, drawn, bounds)
    first = graph.lowest_where(allowed, number, dim=0, none=tries)
    if is_open is not allowed:
        first_open = graph.lowest_where(is_open, number, dim=0, none=tries)
        is_told = graph.compare("eq.Tensor", (1, 1), first, first_open)
        first = graph.add("where.self", "int64", (1, 1), is_told, first, graph.full(tries, (1, 1)))
    is_first = graph.compare("eq.Tensor", (tries, 1), number, first)
    found = graph.lowest_where(is_first, graph.view(drawn, (tries, 1)), dim=0, none=count)
    is_found = graph.compare("lt.Scalar", (1, 1), found, other=count)
    return graph.add("where.self", "int64", (1, 1), is_found, found, graph.full(UNDECIDED, (1, 1)))


def _allowed(tokens: _Tokens, drawn: IRTensor, bounds: dict[str, IRTensor]) -> tuple[IRTensor, IRTensor]:
    """Which drawn tokens [tries, 1] the limits allow for certain, and which they may allow."""
    graph, (tries,) = tokens.graph, drawn["shape"]
    if len(bounds) == 1:
        ((limit, bound),) = bounds.items()
        if limit == "top_p":
            bound = graph.same("mul.Tensor", tokens.total, bound)
        before = _before(tokens, drawn, tokens.weights if limit == "top_p" else None)
        allowed = graph.compare("lt.Tensor", (tries, 1), before, bound)
        return allowed, allowed
    pivots = _pivots(tokens)
    (pivot_count,) = pivots["shape"]
    both = graph.add("cat.default", "int64", (tries + pivot_count,), drawn, pivots, dim=0)
    numbers, masses = _before(tokens, both, None), _before(tokens, both, tokens.weights)
    number, mass = (_part(graph, each, 0, tries) for each in (numbers, masses))
    shares = [
        graph.same("mul.Tensor", each, bounds["top_p"])
        for each in _of_likeliest(tokens, pivots, numbers, masses, bounds["top_k"])
    ]
    is_likely = graph.compare("lt.Tensor", (tries, 1), number, bounds["top_k"])
    least, most = (graph.compare("lt.Tensor", (tries, 1), mass, share) for share in shares)
    allowed, is_open = (graph.compare("logical_and.default", (tries, 1), is_likely, each) for each in (least, most))
    return allowed, is_open


def _pivots(tokens: _Tokens) -> IRTensor:
    """The likeliest token of each of the rows where that is likeliest: int64 [P], in the order of probability."""
    graph, (rows, columns) = tokens.graph, tokens.weights["shape"]
    places = graph.arange((rows, columns), rows * columns)
    is_highest = graph.compare("eq.Tensor", (rows, columns), graph.view(tokens.logits, (rows, columns)), tokens.highest)
    place = graph.lowest_where(is_highest, places, dim=1, none=rows * columns - 1)
    square, count = (rows, rows), min(PIVOTS, rows)
    others = graph.view(tokens.highest, (1, rows))
    likelier = graph.compare("gt.Tensor", square, others, tokens.highest)
    equal = graph.compare("eq.Tensor", square, others, tokens.highest)
    sooner = graph.compare("lt.Tensor", square, graph.arange((1, rows), rows), graph.arange((rows, 1), rows))
    sooner = graph.compare("logical_and.default", square, equal, sooner)
    before = graph.compare("logical_or.default", square, likelier, sooner)
    rank = graph.add("sum.dim_IntList", "int64", (rows, 1), before, dim=[1], keepdim=True)
    is_wanted = graph.compare("eq.Tensor", (count, rows), graph.view(rank, (1, rows)), graph.arange((count, 1), count))
    wanted = graph.add("expand.default", "int64", (count, rows), graph.view(place, (1, rows)), size=[count, rows])
    return graph.view(graph.lowest_where(is_wanted, wanted, dim=1, none=rows * columns - 1), (count,))


def _of_likeliest(
    tokens: _Tokens, pivots: IRTensor, numbers: IRTensor, masses: IRTensor, top_k: IRTensor
) -> tuple[IRTensor, IRTensor]:
    """The least and the most that the `top_k` likeliest tokens together may weigh: float32 [1, 1] each."""
    graph, (count,), (size,) = tokens.graph, pivots["shape"], tokens.logits["shape"]
    (whole, _), shape = numbers["shape"], (count, 1)
    number, mass = (_part(graph, each, whole - count, whole) for each in (numbers, masses))
    own = graph.add("index_select.default", "float32", (count,), graph.view(tokens.weights, (size,)), pivots, dim=0)
    with_own = graph.same("add.Tensor", mass, graph.view(own, shape))
    is_inside = graph.compare("lt.Tensor", shape, number, top_k)
    inside = graph.add("where.self", "float32", shape, is_inside, with_own, _zero(graph))
    reached = graph.add("where.self", "float32", shape, is_inside, with_own, mass)
    following = graph.same("add.Scalar", number, other=1)
    is_behind = graph.compare("ge.Tensor", shape, following, top_k)
    outside = graph.add("where.self", "float32", shape, is_behind, reached, tokens.total)
    return graph.reduce("amax.default", inside, dim=0), graph.reduce("amin.default", outside, dim=0)


def _part(graph: IRBuilder, values: IRTensor, start: int, end: int) -> IRTensor:
    return graph.add("slice.Tensor", "float32", (end - start, 1), values, dim=0, start=start, end=end)


def _before(tokens: _Tokens, given: IRTensor, weights: IRTensor | None) -> IRTensor:
    """What comes before each given token, weighed or counted: float32 [G, 1]."""
    graph, (count,), (rows, columns) = tokens.graph, given["shape"], tokens.weights["shape"]
    one, whole, scalar = (1, rows, columns), (count, rows, columns), (count, 1, 1)
    logits, places = graph.view(tokens.logits, one), graph.arange(one, rows * columns)
    own = graph.add("index_select.default", tokens.logits["dtype"], (count,), tokens.logits, given, dim=0)
    likelier = graph.compare("gt.Tensor", whole, logits, graph.view(own, scalar))
    equal = graph.compare("eq.Tensor", whole, logits, graph.view(own, scalar))
    sooner = graph.compare("lt.Tensor", whole, places, graph.view(given, scalar))
    sooner = graph.compare("logical_and.default", whole, equal, sooner)
    before = graph.compare("logical_or.default", whole, likelier, sooner)
    counted = graph.full(1.0, (1,), "float32") if weights is None else graph.view(weights, one)
    kept = graph.add("where.self", "float32", whole, before, counted, _zero(graph))
    sums = graph.reduce("sum.dim_IntList", graph.reduce("sum.dim_IntList", kept, dim=2), dim=1)
    return graph.view(sums, (count, 1))
