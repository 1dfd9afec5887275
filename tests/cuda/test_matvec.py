"""Products by a few vectors, with what is computed before and after them in the same kernel, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from npu_compiler import CompiledProgram, compile, extract
from npu_runtime import Device
from tests.cuda.kernels import check_plan_compiles
from tests.metal.graphs import Graph, Node
from tests.support.extraction import Function

BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


class CUDAGraph(Graph):
    """A small graph that is compiled for CUDA."""

    def compile(self, *outputs: Node) -> CompiledProgram:
        name = {torch.float16: "float16", torch.bfloat16: "bfloat16"}[self.dtype]
        return compile(self._builder.build(*(node.value for node in outputs)), target="cuda", dtype=name)


def entries(program: CompiledProgram) -> list[str]:
    return [program.main.kernels[step.kernel].entry for step in program.main.calls]  # type: ignore[union-attr]


def rms_norm(graph: Graph, x: Node) -> Node:
    exact = graph.call("to.dtype", x, torch.float32)
    mean = graph.call("mean.dim", graph.call("pow.Tensor_Scalar", exact, 2), [-1], True)
    scaled = graph.call("mul.Tensor", exact, graph.call("rsqrt", graph.call("add.Tensor", mean, 1e-5)))
    return graph.call("mul.Tensor", graph.weight(x.reference.shape[-1]), graph.call("to.dtype", scaled, graph.dtype))


@BOTH
@pytest.mark.parametrize(("size", "width"), [(1536, 2048), (1536, 300), (8960, 1536), (64, 200), (51, 33), (2056, 70)])
def test_norm_in_the_prologue(size: int, width: int, dtype: torch.dtype, device: Device) -> None:
    graph = CUDAGraph(dtype)
    x = rms_norm(graph, graph.input(1, 1, size))
    result = graph.call("linear", x, graph.weight(width, size), graph.weight(width))
    assert entries(graph.check(result, roundings=4, device=device)) == ["matvec"]


@BOTH
@pytest.mark.parametrize("size", [12, 96, 512, 8960])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_gated_activation_in_the_epilogue(rows: int, size: int, dtype: torch.dtype, device: Device) -> None:
    graph = CUDAGraph(dtype)
    x = graph.input(rows, size)
    gate, up = (graph.call("linear", x, graph.weight(148, size)) for _ in range(2))
    result = graph.call("mul.Tensor", graph.call("silu", gate), up)
    assert len(entries(graph.check(result, roundings=4, device=device))) == 1


@BOTH
@pytest.mark.parametrize(("rows", "size", "width"), [(1, 1536, 1536), (1, 8960, 1536), (4, 1536, 258), (8, 320, 5000)])
def test_residual_in_the_epilogue(rows: int, size: int, width: int, dtype: torch.dtype, device: Device) -> None:
    graph = CUDAGraph(dtype)
    result = graph.call("linear", graph.input(rows, size), graph.weight(width, size))
    result = graph.call("add.Tensor", graph.input(rows, width), result)
    assert entries(graph.check(result, roundings=3, device=device)) == ["matvec" if rows == 1 else "few_rows"]


def test_batches_of_vectors(device: Device) -> None:
    graph = CUDAGraph(torch.bfloat16)
    result = graph.call("matmul", graph.input(2, 6, 1, 128), graph.input(2, 6, 128, 90))
    transposed = graph.call("transpose.int", graph.input(6, 90, 128), 1, 2)
    graph.check(result, graph.call("bmm", graph.input(6, 3, 128), transposed), roundings=2, device=device)


def _at_the_end(x: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What text encoders of pictures give: the row of the greatest token, normed and projected."""
    row = x[torch.arange(x.shape[0]), tokens.argmax(-1)]
    return torch.nn.functional.layer_norm(row, row.shape[-1:]) @ weight.t()


@pytest.mark.parametrize("architecture", [80, 90])
def test_a_row_is_found_in_the_prologue(architecture: int) -> None:
    """The functions of a reduction stand behind the kernel's own macros, and have none of their names."""
    given = torch.randn(1, 16, 64), torch.randint(99, (1, 16), dtype=torch.int32), torch.randn(48, 64)
    program = compile(extract(Function(_at_the_end), given), target="cuda")
    assert entries(program) == ["matvec"]
    check_plan_compiles(program.main, architecture)
