"""Norms whose factors wait for the epilogue of the next product: what is stored for them, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_compiler
import npu_compiler.frontend.coded_layers  # defines npu_codes::dequantize
from cuda_compiler.devices import DEVICES
from cuda_compiler.products import bulk, coded_rows, packed
from cuda_compiler.products.bulk_tilings import BulkTiling
from cuda_compiler.products.coded_rows_sizes import ByWarpgroups, ByWarps, CodedRows
from cuda_compiler.tiles.tiling import BULK
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, options_of
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.lowering.candidates import Candidate
from npu_compiler.lowering.device_model import DeviceModel
from npu_runtime import Device, load
from tests.cuda.kernels import check_compile, kernels_for
from tests.cuda.test_matvec import CUDAGraph, rms_norm
from tests.metal.graphs import Node
from tests.support.host_kernels import HAS_COMPILER, run_plan_on_host
from tests.support.ir_builder import IRBuilder, Value

MODEL = DEVICES.named("sm_90", "cuda")
MOST = 256
EPS = 1e-6
HALF = torch.bfloat16


def device_of_factors(most: int = MOST) -> DeviceModel:
    """An H200 on which such factors pay up to so many rows."""
    constants = {**MODEL.families[BULK], "factored_rows": most}
    return replace(MODEL, families={**MODEL.families, BULK: constants})


@dataclass
class Block:
    """Products with a norm between them: ``x = a @ v + r``, and what reads ``norm(x)``.

    Attributes:
        m, n, k, width: Rows; columns of x, of `a`, and of results.
        readers: What these are: ``biased``, or ``gated`` by two products as one.
        shape: How the rows of x are seen by the norm.
    """

    m: int
    n: int
    k: int = 64
    width: int = 96
    readers: tuple[str, ...] = ("biased", "gated")
    dtype: torch.dtype = HALF
    shape: tuple[int, ...] = ()

    def compiled(self, most: int = MOST, change: Callable[[Any, Value], Value] | None = None) -> ExecutionPlan:
        """The plan; `change` makes another norm of x."""
        return self.program(most, change).main

    def program(self, most: int = MOST, change: Callable[[Any, Value], Value] | None = None) -> CompiledProgram:
        self.graph = IRBuilder()
        rows = self.graph.input("r", (self.m, self.n), self.dtype)
        x = self.call("linear", self.graph.input("a", (self.m, self.k), self.dtype), self.weight("v", self.n, self.k))
        x = self.call("add.Tensor", rows, x)
        seen = self.call("reshape", x, [*self.shape, self.n]) if self.shape else x
        normed = (change or Block.norm)(self, seen)
        results = [getattr(self, name)(normed) for name in self.readers]
        source, kind = self.graph.build(x, *results), str(self.dtype).removeprefix("torch.")
        return npu_compiler.compile(source, "cuda", kind, device_of_factors(most))

    def biased(self, normed: Value) -> Value:
        return self.call("linear", normed, self.weight("w", self.width, self.n), self.weight("b", self.width))

    def gated(self, normed: Value) -> Value:
        gate, up = (self.call("linear", normed, self.weight(name, self.width, self.n)) for name in ("gate", "up"))
        return self.call("mul.Tensor", self.call("silu", gate), up)

    def call(self, op: str, *args: Any) -> Value:
        return self.graph.call(f"aten.{op}" if "." in op else f"aten.{op}.default", *args)

    def weight(self, name: str, *shape: int) -> Value:
        return self.graph.weight(name, shape, self.dtype)

    def norm(self, x: Value) -> Value:
        exact = self.call("to.dtype", x, torch.float32)
        mean = self.call("mean.dim", self.call("pow.Tensor_Scalar", exact, 2), [-1], True)
        scaled = self.call("mul.Tensor", exact, self.call("rsqrt", self.call("add.Tensor", mean, EPS)))
        return self.call("mul.Tensor", self.weight("g", self.n), self.call("to.dtype", scaled, self.dtype))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Inputs and weights: rows of very different size, one of zeros, and gains of a wide range."""
        random = torch.Generator().manual_seed(0)
        shapes: dict[str, tuple[int, ...]] = {
            "a": (self.m, self.k),
            "r": (self.m, self.n),
            "v": (self.n, self.k),
            "w": (self.width, self.n),
        }
        shapes |= {"gate": (self.width, self.n), "up": (self.width, self.n), "b": (self.width,), "g": (self.n,)}
        made = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
        sizes = 10.0 ** torch.arange(self.m).remainder(9).sub(4)[:, None]
        sizes[self.m // 2] = 0.0
        made["a"], made["r"] = made["a"] * sizes, made["r"] * sizes
        made["g"] = made["g"] * 10.0 ** torch.arange(self.n).remainder(4).sub(2)
        return {name: tensor.to(self.dtype) for name, tensor in made.items()}


@dataclass
class CodedBlock(Block):
    """The same by matrices in codes of a byte, with a scale for each row."""

    def weight(self, name: str, *shape: int) -> Value:
        if len(shape) == 1:
            return super().weight(name, *shape)
        codes = self.graph.weight(f"{name}_codes", shape, torch.int8)
        scales = self.graph.weight(f"{name}_scales", (shape[0], 1), self.dtype)
        form = 8, shape[1], shape[1], 1, 0  # bits, k, group, rows, zero
        return self.graph.call("npu_codes.dequantize.default", codes, scales, None, None, None, *form, self.dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        given = super().tensors()
        for name in ("v", "w", "gate", "up"):
            scales = (given[name].float().abs().amax(1, keepdim=True) / 127).to(self.dtype)
            codes = (given[name].double() / scales.double()).round().clamp(-127, 127)
            given[name] = codes * scales.double()
            given |= {f"{name}_codes": codes.to(torch.int8), f"{name}_scales": scales}
        return given


def launches(plan: ExecutionPlan) -> list[str]:
    calls = [call for step in plan.steps for call in options_of(step)[0].calls]
    return [plan.kernels[call.kernel].entry for call in calls if isinstance(call, KernelCall)]


def on_host(plan: ExecutionPlan, given: dict[str, torch.Tensor], folder: Path, option: int) -> list[torch.Tensor]:
    """The outputs in float64, by one option of each choice; blocks that stay take several tiles."""
    calls = [call for step in plan.steps for call in options_of(step)[option].calls if isinstance(call, KernelCall)]
    stays = [plan.kernels[call.kernel].entry == "matmul_bulk" and call.grid[1] == 1 for call in calls]
    few = [replace(call, grid=(2, 1, 1)) if stay else call for call, stay in zip(calls, stays, strict=True)]
    named = {name if name in ("a", "r") else f"p_{name}": tensor for name, tensor in given.items()}
    named["interleave(gate, up)"] = torch.stack([given["gate"], given["up"]], 1)
    for part in ("codes", "scales"):
        if f"gate_{part}" in given:
            named[f"interleave(gate_{part}, up_{part})"] = torch.stack(
                [given[f"{of}_{part}"] for of in ("gate", "up")], 1
            )
    raw = {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in named.items()}
    found = run_plan_on_host(replace(plan, steps=tuple(few)), raw, folder)
    rows = given["a"].shape[0]
    return [torch.from_numpy(found[spec.name].copy()).view(HALF).reshape(rows, -1).double() for spec in plan.outputs]


def expected(x: torch.Tensor, given: dict[str, torch.Tensor], reader: str, rounded: bool) -> torch.Tensor:
    """What follows a norm of x, in float64; `rounded` where norm and results are stored."""
    kind = HALF if rounded else torch.float64
    w, gate, up, b, g = (given[name].double() for name in ("w", "gate", "up", "b", "g"))
    normed = (x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * g).to(kind).double()
    gated = torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)
    return (normed @ w.T + b if reader == "biased" else gated).to(kind).double()


ON_HOST = [
    (Block(30, 96, 136, 64, readers=("biased",)), BulkTiling(64, 64, splits=2, stages=3), 0),
    (Block(130, 160, readers=("gated",)), BulkTiling(128, 64, turns=True, stages=3), 0),
    (Block(33, 64, 64, 32, readers=("gated",), shape=(33, 1)), BulkTiling(64, 64, stages=3), -1),
]


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize(("block", "tiling", "option"), ON_HOST, ids=["splits", "turns", "another device"])
def test_factors_on_the_processor(
    block: Block, tiling: BulkTiling, option: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bulk, "bulk_tilings", lambda *_: (tiling,))
    plan, given = block.compiled(), block.tensors()
    assert launches(plan) == ["matmul_bulk"] * 2
    x, found = on_host(plan, given, tmp_path, option)
    check_factors(block, given, [x, found])
    assert torch.equal(found[block.m // 2], expected(x, given, block.readers[0], False)[block.m // 2])  # of zeros
    others = {**given, "a": given["a"].flip(0), "r": given["r"].flip(0)}
    for name in ("a", "r"):
        others[name][3] = given[name][3]
    for one, other in zip((x, found), on_host(plan, others, tmp_path, option), strict=True):
        assert torch.equal(one[3], other[3])


CODED_ON_HOST = [
    (CodedBlock(30, 96, 160, 64, readers=("biased",)), ByWarpgroups(3, 1, 1)),
    (CodedBlock(64, 160, 256, readers=("gated",)), ByWarpgroups(3, 2, 1, places=64)),
    (CodedBlock(33, 64, 64, 32, readers=("gated",)), ByWarps(3, 1, 1, 4)),
]


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize(("block", "sizes"), CODED_ON_HOST, ids=["a tile", "clusters", "followers apart"])
def test_factors_behind_codes_on_the_processor(
    block: CodedBlock, sizes: CodedRows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    candidate = Candidate("coded_rows", sizes, 1.0, "")
    monkeypatch.setattr(coded_rows, "_ranked", lambda *_: (candidate,))
    monkeypatch.setattr(packed, "coded_rows_microseconds", lambda *_: 0.0)
    plan, given = block.compiled(), block.tensors()
    entry = "warpgroup_codes" if isinstance(sizes, ByWarpgroups) else "coded_rows"
    assert launches(plan).count(entry) == 2
    assert len(launches(plan)) == (2 if isinstance(sizes, ByWarpgroups) else 4)
    check_factors(block, given, on_host(plan, given, tmp_path, 0))


def check_factors(block: Block, given: dict[str, torch.Tensor], results: list[torch.Tensor]) -> None:
    """Whether x and what reads its norm err as they do where the norm is stored."""
    x, *found = results
    exact = given["a"].double() @ given["v"].double().T + given["r"].double()
    assert (x - exact).norm() <= 1.1 * (exact.to(HALF).double() - exact).norm()
    for reader, result in zip(block.readers, found, strict=True):
        exact, normed_first = (expected(x, given, reader, rounded) for rounded in (False, True))
        assert (result - exact).norm() <= 1.1 * (normed_first - exact).norm()


def test_kernels_compile() -> None:
    for block in (Block(40, 1536, 1536, 512), CodedBlock(40, 1536, 1536, 512)):
        check_compile(kernels_for(block.compiled(), 90), 90)


def without_gain(block: Block, x: Value) -> Value:
    return block.call("rms_norm", x, [block.n], None, EPS)


def by_quotient(block: Block, x: Value) -> Value:
    mean = block.call("mean.dim", block.call("mul.Tensor", x, x), [-1], True)
    return block.call("div.Tensor", x, block.call("sqrt", block.call("add.Tensor", mean, EPS)))


def gain_and_one(block: Block, x: Value) -> Value:
    gain = block.call("add.Tensor", block.weight("g", block.n), 1.0)
    return block.call("mul.Tensor", without_gain(block, x), gain)


def layer_norm(block: Block, x: Value) -> Value:
    return block.call("layer_norm", x, [block.n], block.weight("g", block.n))


def gain_of_each_text(block: Block, x: Value) -> Value:
    gains = block.graph.input("gains", (2, 1, block.n), block.dtype)
    return block.call("mul.Tensor", without_gain(block, x), gains)


def gain_made_of_the_source(block: Block, x: Value) -> Value:
    return block.call("mul.Tensor", block.norm(x), block.call("linear", x, block.weight("u", block.n, block.n)))


def softmax(block: Block, x: Value) -> Value:
    return block.call("_softmax", x, -1, False)


@pytest.mark.parametrize("norm", [Block.norm, without_gain, by_quotient, gain_and_one])
def test_norms_that_take_no_launch(norm: Callable[[Block, Value], Value]) -> None:
    assert launches(Block(64, 96).compiled(change=norm)) == ["matmul_bulk"] * 3
    assert "rows" in launches(Block(64, 96).compiled(0, norm))


@pytest.mark.parametrize(
    ("block", "norm"),
    [
        (Block(64, 96), layer_norm),
        (Block(64, 96), softmax),
        (Block(64, 96, dtype=torch.float16), Block.norm),
        (Block(MOST + 1, 96), Block.norm),
        (Block(16, 96), Block.norm),
        (Block(64, 80), Block.norm),
        (Block(64, 96, shape=(2, 32)), gain_of_each_text),
        (Block(64, 96), gain_made_of_the_source),
    ],
)
def test_norms_that_stay(block: Block, norm: Callable[[Block, Value], Value]) -> None:
    assert launches(block.compiled(change=norm)) == launches(block.compiled(0, norm))


def test_other_devices_store_the_same() -> None:
    for option in options_of(Block(64, 96).compiled().steps[0]):
        stored = [argument for call in option.calls for argument in call.args if argument.writes]
        assert len({(argument.buffer, argument.offset) for argument in stored}) == 3


class FactoredGraph(CUDAGraph):
    """A small graph, compiled for an H200 on which factors wait for epilogues."""

    def compile(self, *outputs: Node) -> CompiledProgram:
        source = self._builder.build(*(node.value for node in outputs))
        return npu_compiler.compile(source, "cuda", "bfloat16", device_of_factors())


@pytest.mark.parametrize("m", [17, 40, 64, 130, 256])
def test_equals_torch(m: int, device: Device) -> None:
    graph = FactoredGraph(HALF)
    x = graph.call("linear", graph.input(m, 8960), graph.weight(1536, 8960))
    x = graph.call("add.Tensor", graph.input(m, 1536), x)
    normed = rms_norm(graph, x)
    biased = graph.call("linear", normed, graph.weight(2048, 1536), graph.weight(2048))
    gate, up = (graph.call("linear", normed, graph.weight(512, 1536)) for _ in range(2))
    gated = graph.call("mul.Tensor", graph.call("silu", gate), up)
    assert launches(graph.check(x, biased, gated, roundings=4, device=device).main) == ["matmul_bulk"] * 3


@pytest.mark.parametrize("m", [17, 40, 64])
def test_codes_equal_exact_products(m: int, device: Device) -> None:
    block = CodedBlock(m, 1536, 8960, 512)
    program, given = block.program(), block.tensors()
    assert launches(program.main) == ["warpgroup_codes"] * 3
    inputs = {name: given[name] for name in ("a", "r")}
    found = load(program, {name: given[name] for name in given if name not in inputs}, device)(**inputs)
    check_factors(block, given, [torch.as_tensor(each).double().cpu() for each in found])
