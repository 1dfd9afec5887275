"""Attention on the Metal kernels, against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.metal.graphs import Graph, Node
from tests.metal.test_matmul import BOTH, entries

LOWEST = {torch.float16: -65504.0, torch.bfloat16: torch.finfo(torch.bfloat16).min}


def heads(graph: Graph, batch: int, count: int, rows: int, size: int) -> Node:
    """[batch, count, rows, size], the heads side by side in memory as a projection leaves them."""
    return graph.call("permute", graph.input(batch, rows, count, size), [0, 2, 1, 3])


def attention(graph: Graph, q: Node, k: Node, v: Node, mask: torch.Tensor | None = None, **options: Any) -> Node:
    given = None
    if mask is not None:
        given = Node(graph.input(*mask.shape, dtype=mask.dtype, data=mask).value, mask)
    grouped = q.reference.shape[1] != k.reference.shape[1]
    if given is not None and mask is not None and mask.dtype != torch.bool:
        given = Node(given.value, mask.double())
    causal = options.pop("causal", False)
    return graph.call("scaled_dot_product_attention", q, k, v, given, 0.0, causal, **options, enable_gqa=grouped)


def up_to(last: int, length: int) -> torch.Tensor:
    return (torch.arange(length) <= last)[None, None, None]


@BOTH
@pytest.mark.parametrize(("size", "rows", "length"), [(16, 33, 50), (64, 1, 70), (80, 19, 19), (128, 33, 50)])
def test_head_sizes(size: int, rows: int, length: int, dtype: torch.dtype) -> None:
    graph = Graph(dtype)
    q, k, v = heads(graph, 2, 2, rows, size), heads(graph, 2, 2, length, size), heads(graph, 2, 2, length, size)
    assert entries(graph.check(attention(graph, q, k, v), roundings=2)) == ["attention"]


@pytest.mark.parametrize(
    ("size", "value_size", "length", "dtype"),
    [
        (64, 64, 8, torch.float16),
        (24, 192, 304, torch.float16),
        (256, 256, 136, torch.float16),
        (128, 128, 4104, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("kind", ["open", "causal", "boolean", "added"])
def test_few_rows_read_keys_and_values_as_matrices(
    size: int, value_size: int, length: int, dtype: torch.dtype, kind: str
) -> None:
    graph = Graph(dtype)
    q, k = heads(graph, 1, 6, 5 if size == 256 else 1, size), graph.input(1, 2, length, size)
    v = heads(graph, 1, 2, length, value_size)
    is_open = up_to(length * 2 // 3, length)
    masks = {"boolean": is_open, "added": torch.where(is_open, 0.5, LOWEST[dtype]).to(dtype)}
    program = graph.check(attention(graph, q, k, v, masks.get(kind), causal=kind == "causal"), roundings=2)
    assert "#define DIRECT 1" in program.functions["main"].kernels[0].text


@pytest.mark.parametrize(("size", "value_size"), [(12, 20), (7, 5), (256, 256), (64, 33)])
def test_odd_and_large_heads(size: int, value_size: int) -> None:
    graph = Graph()
    q, k, v = heads(graph, 1, 2, 5, size), heads(graph, 1, 2, 40, size), heads(graph, 1, 2, 40, value_size)
    graph.check(attention(graph, q, k, v), roundings=2)


@pytest.mark.parametrize(("rows", "size"), [(20, 64), (3, 256)])
def test_float32_operands(rows: int, size: int) -> None:
    graph = Graph()
    q, k, v = (graph.input(1, 2, n, size, dtype=torch.float32) for n in (rows, 50, 50))
    result = graph.call("to.dtype", attention(graph, q, k, v), torch.float16)
    graph.check(graph.call("add.Tensor", result, graph.weight(size)), roundings=2)


@pytest.mark.parametrize(("query_heads", "key_heads"), [(6, 2), (12, 2), (9, 1)])
@pytest.mark.parametrize("rows", [1, 13])
def test_shared_key_heads(query_heads: int, key_heads: int, rows: int) -> None:
    graph = Graph()
    q = heads(graph, 2, query_heads, rows, 32)
    k, v = (graph.input(2, key_heads, 45, 32) for _ in range(2))
    graph.check(attention(graph, q, k, v, scale=0.3), roundings=2)


@pytest.mark.parametrize(("rows", "length"), [(40, 40), (33, 70), (70, 33), (1, 9)])
def test_causal(rows: int, length: int) -> None:
    graph = Graph()
    q, k, v = heads(graph, 1, 4, rows, 24), heads(graph, 1, 2, length, 24), heads(graph, 1, 2, length, 24)
    graph.check(attention(graph, q, k, v, causal=True), roundings=2)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 4, 21, 150), torch.float16),
        ((2, 1, 1, 150), torch.float16),
        ((21, 150), torch.bfloat16),
        ((1, 4, 21, 1), torch.float16),
    ],
)
@pytest.mark.parametrize("kind", ["boolean", "infinite", "lowest", "any"])
def test_masks(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    graph = Graph(dtype)
    q, k, v = heads(graph, 2, 4, 21, 16), heads(graph, 2, 2, 150, 16), heads(graph, 2, 2, 150, 16)
    is_open = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3
    is_open[..., 40:] = False  # whole blocks
    is_open[..., 0] = True  # and no row that is closed everywhere
    if kind == "any":
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(dtype) * 4 - 2
    elif kind == "boolean":
        mask = is_open
    else:
        mask = torch.where(is_open, 0.5, -torch.inf if kind == "infinite" else LOWEST[dtype]).to(dtype)
    graph.check(attention(graph, q, k, v, mask), roundings=2)


@pytest.mark.parametrize("value", [False, -torch.inf, LOWEST[torch.bfloat16]])
def test_rows_closed_everywhere(value: float) -> None:
    """Zeros where nothing is open, as PyTorch has it; the mean where all scores vanish beside what is added."""
    graph = Graph(torch.bfloat16)
    q, k, v = heads(graph, 1, 2, 3, 16), heads(graph, 1, 2, 90, 16), heads(graph, 1, 2, 90, 16)
    mask = torch.ones(1, 1, 3, 90, dtype=torch.bool)
    mask[:, :, 1] = False
    added = mask if value is False else torch.where(mask, 0.0, value).to(torch.bfloat16)
    result = attention(graph, q, k, v, added)
    if value == LOWEST[torch.bfloat16]:
        result.reference[:, :, 1] = v.reference.mean(dim=2)  # in float64 the scores do not quite vanish
    graph.check(result, roundings=2)


@pytest.mark.parametrize("kind", ["boolean", "infinite", "lowest"])
@pytest.mark.parametrize(("rows", "length", "size"), [(1, 300, 32), (20, 300, 32), (1, 5000, 32), (1, 640, 128)])
def test_closed_blocks_are_not_read(rows: int, length: int, size: int, kind: str) -> None:
    """What the mask closes holds NaN, which would show."""
    graph = Graph(torch.bfloat16)
    last = 70  # the block of 32 or more that it lies in ends at 127 at the latest
    q = heads(graph, 1, 4, rows, size)
    k, v = (poisoned(graph, length, size, 128) for _ in range(2))
    is_open = up_to(last, length).expand(1, 1, rows, length)
    closed = -torch.inf if kind == "infinite" else LOWEST[torch.bfloat16]
    mask = is_open if kind == "boolean" else torch.where(is_open, 0.0, closed).to(torch.bfloat16)
    result = attention(graph, q, k, v, mask)
    assert not result.reference.isnan().any()
    graph.check(result, roundings=2)


def poisoned(graph: Graph, length: int, size: int, end: int) -> Node:
    """Two heads of which all positions from `end` on are NaN; in the reference they are zero."""
    data = torch.rand(1, 2, length, size, generator=torch.Generator().manual_seed(2)).to(graph.dtype) - 0.5
    clean = data.clone()
    clean[:, :, end:] = 0
    data[:, :, end:] = torch.nan
    return Node(graph.input(*data.shape, data=data).value, clean.double())


@pytest.mark.parametrize(("last", "kind"), [(40, "boolean"), (32767, "boolean"), (9000, "infinite")])
def test_long_cache(last: int, kind: str) -> None:
    graph = Graph(torch.bfloat16)
    q, k, v = heads(graph, 1, 6, 1, 16), graph.input(1, 2, 32768, 16), graph.input(1, 2, 32768, 16)
    mask = up_to(last, 32768)
    if kind == "infinite":
        mask = torch.where(mask, 0.0, -torch.inf).to(torch.bfloat16)
    program = graph.check(attention(graph, q, k, v, mask), roundings=2)
    assert entries(program) == ["attention", "attention_combine"]


def test_long_cache_with_a_batch_and_an_epilogue() -> None:
    graph = Graph()
    q, k, v = (heads(graph, 2, 2, n, 20) for n in (2, 4200, 4200))
    result = attention(graph, q, k, v, causal=True)
    merged = graph.call("view", graph.call("contiguous", graph.call("transpose.int", result, 1, 2)), [2, 2, 40])
    program = graph.check(graph.call("add.Tensor", merged, graph.input(2, 2, 40)), roundings=2)
    assert entries(program)[:2] == ["attention", "attention_combine"]


def test_nan_stays_in_its_row() -> None:
    graph = Graph()
    data = torch.rand(1, 2, 9, 16, generator=torch.Generator().manual_seed(3)).half()
    data[0, 1, 4, 3] = torch.nan
    q, k, v = graph.input(1, 2, 9, 16, data=data), graph.input(1, 2, 20, 16), graph.input(1, 2, 20, 16)
    result = attention(graph, q, k, v)
    assert int(result.reference.isnan().any(-1).sum()) == 1
    graph.check(result, roundings=2)


@pytest.mark.parametrize("masked", [False, True])
def test_spelled_out(masked: bool) -> None:
    """The eager form: products, scale, mask and softmax become one kernel."""
    graph = Graph()
    q, k, v = heads(graph, 1, 2, 9, 16), heads(graph, 1, 2, 30, 16), heads(graph, 1, 2, 30, 16)
    scores = graph.call("mul.Tensor", graph.call("matmul", q, graph.call("transpose.int", k, 2, 3)), 0.25)
    if masked:
        scores = graph.call("add.Tensor", scores, graph.input(1, 1, 9, 30))
    result = graph.call("matmul", graph.call("softmax.int", scores, -1), v)
    assert entries(graph.check(result, roundings=2)) == ["attention"]


def test_larger_heads_are_products() -> None:
    graph = Graph()
    q, k, v = (graph.input(1, 1, 4, 257) for _ in range(3))
    assert "attention" not in entries(graph.check(attention(graph, q, k, v), roundings=3))
