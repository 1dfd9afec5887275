"""Matrix products on the Metal kernels, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch

from npu_compiler import CompiledProgram
from npu_compiler.artifact.plan import KernelCall
from tests.metal.graphs import Graph

BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat"])
SIZES = [(64, 64, 64), (65, 33, 31), (2, 3, 5), (7, 130, 200), (49, 40, 72), (200, 96, 128)]


def entries(program: CompiledProgram) -> list[str]:
    """The kernels in the order in which they run."""
    plan = program.functions["main"]
    return [plan.kernels[step.kernel].entry for step in plan.steps if isinstance(step, KernelCall)]


@BOTH
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_mm(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    graph = Graph(dtype)
    program = graph.check(graph.call("mm", graph.input(m, k), graph.input(k, n)))
    assert entries(program) == ["matmul"]


@BOTH
@pytest.mark.parametrize("epilogue", ["bias", "bias+relu", "residual", "residual+gelu"])
def test_linear_with_epilogue(epilogue: str, dtype: torch.dtype) -> None:
    graph = Graph(dtype)
    x, weight = graph.input(50, 40), graph.weight(72, 40)
    result = graph.call("linear", x, weight, graph.weight(72) if "bias" in epilogue else None)
    if "residual" in epilogue:
        result = graph.call("add.Tensor", result, graph.input(50, 72))
    if "relu" in epilogue:
        result = graph.call("relu", result)
    if "gelu" in epilogue:
        result = graph.call("gelu", result)
    assert entries(graph.check(result, roundings=2)) == ["matmul"]


@BOTH
@pytest.mark.parametrize("dims", [((0, 1), (1, 0)), ((1, 0), (0, 1)), ((1, 0), (1, 0))], ids=["B", "A", "both"])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 64), (41, 30, 19)])
def test_transposed_operands(m: int, n: int, k: int, dims: tuple[tuple[int, int], ...], dtype: torch.dtype) -> None:
    graph = Graph(dtype)
    a_dims, b_dims = dims
    a = graph.input(*((m, k) if a_dims == (0, 1) else (k, m)))
    b = graph.input(*((k, n) if b_dims == (0, 1) else (n, k)))
    a = a if a_dims == (0, 1) else graph.call("permute", a, [1, 0])
    b = b if b_dims == (0, 1) else graph.call("permute", b, [1, 0])
    assert entries(graph.check(graph.call("mm", a, b))) == ["matmul"]


@BOTH
@pytest.mark.parametrize(("n", "k"), [(64, 64), (1000, 512), (33, 30), (1, 9), (257, 2048)])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_vector_times_matrix(n: int, k: int, layout: str, dtype: torch.dtype) -> None:
    graph = Graph(dtype)
    x, bias = graph.input(1, k), graph.weight(n)
    if layout == "rows":
        result = graph.call("linear", x, graph.weight(n, k), bias)
    else:
        result = graph.call("addmm", bias, x, graph.weight(k, n))
    (entry,) = entries(graph.check(result))
    assert entry == ("matvec" if layout == "rows" or n == 1 else "matvec_columns")


@BOTH
@pytest.mark.parametrize(("m", "k"), [(64, 64), (47, 130)])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_times_vector(m: int, k: int, transposed: bool, dtype: torch.dtype) -> None:
    graph = Graph(dtype)
    matrix = graph.input(k, m) if transposed else graph.input(m, k)
    if transposed:
        matrix = graph.call("permute", matrix, [1, 0])
    result = graph.call("add.Tensor", graph.call("mm", matrix, graph.input(k, 1)), graph.input(m, 1))
    (entry,) = entries(graph.check(result))
    assert entry == ("matvec_columns" if transposed else "matvec")


@BOTH
@pytest.mark.parametrize(("m", "n"), [(33, 48), (1, 40), (40, 1)])
def test_batch(m: int, n: int, dtype: torch.dtype) -> None:
    graph = Graph(dtype)
    result = graph.call("bmm", graph.input(5, m, 24), graph.input(5, 24, n))
    assert len(graph.check(result).functions["main"].steps) == 1


@pytest.mark.parametrize("m", [1, 20])
def test_batch_that_broadcasts(m: int) -> None:
    graph = Graph()
    a, b = graph.input(2, 1, m, 16), graph.input(3, 16, 24)
    assert len(graph.check(graph.call("matmul", a, b)).functions["main"].steps) == 1


@pytest.mark.parametrize("m", [1, 12])
def test_three_batch_dimensions_that_do_not_merge(m: int) -> None:
    graph = Graph()
    a, b = graph.input(2, 1, 3, m, 16), graph.input(4, 1, 16, 24)
    result = graph.call("add.Tensor", graph.call("matmul", a, b), graph.input(2, 4, 3, m, 24))
    assert len(graph.check(result, roundings=2).functions["main"].steps) == 2


def test_heads_side_by_side() -> None:
    """Attention scores of heads that share a row: strides with gaps, no copy."""
    graph = Graph()
    q, k = graph.input(1, 12, 4, 16), graph.input(1, 20, 4, 16)
    heads = [graph.call("permute", x, [0, 2, 1, 3]) for x in (q, k)]
    scores = graph.call("matmul", heads[0], graph.call("transpose.int", heads[1], -2, -1))
    mask = graph.input(1, 1, 12, 20)
    masked = graph.call("add.Tensor", graph.call("mul.Tensor", scores, 0.25), mask)
    assert entries(graph.check(masked)) == ["matmul"]


def test_operands_with_an_offset_and_odd_strides() -> None:
    graph = Graph()
    a = graph.call("slice.Tensor", graph.input(40, 65), 1, 1, 34)
    b = graph.call("slice.Tensor", graph.input(70, 50), 0, 3, 69, 2)
    assert entries(graph.check(graph.call("mm", a, b))) == ["matmul"]


@pytest.mark.parametrize("m", [1, 30])
def test_float32_operands(m: int) -> None:
    graph = Graph()
    a, b = graph.input(m, 40, dtype=torch.float32), graph.input(40, 36, dtype=torch.float32)
    product = graph.call("mm", a, b)
    graph.check(graph.call("add.Tensor", product, graph.weight(36)))


@pytest.mark.parametrize("m", [1, 9])
def test_no_k_gives_zeros(m: int) -> None:
    graph = Graph()
    result = graph.call("addmm", graph.input(10), graph.input(m, 0), graph.input(0, 10))
    graph.check(result)


def test_epilogue_operand_without_a_stride_over_the_batch() -> None:
    """One value a head, added to scores whose batch dimensions are merged: the epilogue unpacks its position."""
    graph = Graph()
    scores = graph.call("matmul", graph.input(3, 4, 9, 8), graph.input(3, 4, 8, 10))
    assert entries(graph.check(graph.call("add.Tensor", scores, graph.input(1, 4, 1, 1)), roundings=2)) == ["matmul"]


def test_epilogue_that_compares() -> None:
    graph = Graph()
    graph.check(graph.call("gt.Scalar", graph.call("mm", graph.input(9, 8), graph.input(8, 10)), 0.1))


def test_more_products_than_a_grid_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metal_compiler.products.matmul.MAX_GRID", 2)
    graph = Graph()
    product = graph.call("bmm", graph.input(5, 3, 8), graph.input(5, 8, 4))
    program = graph.check(graph.call("add.Tensor", product, graph.input(5, 3, 4)), roundings=2)
    assert len(program.functions["main"].steps) == 3


def test_products_of_other_sizes_share_a_kernel() -> None:
    graph = Graph()
    x = graph.input(64, 32)
    results = [graph.call("mm", x, graph.weight(32, n)) for n in (64, 128, 256)]
    assert len(graph.check(*results).functions["main"].kernels) == 1
