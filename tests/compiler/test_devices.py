"""The devices that programs are compiled for: their data, what programs for them may hold, and who may name numbers."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_compiler
from cuda_compiler.artifact.extensions import cluster_of, map_of
from cuda_compiler.devices import DEVICES as CUDA_DEVICES
from cuda_compiler.target import CUDATarget
from cuda_compiler.tiles.lowering import close_tilings
from cuda_compiler.tiles.tiling import Asked
from cuda_compiler.tiles.warps import WarpCosts, warp_candidates
from cuda_runtime.capability import meets
from metal_compiler.devices import DEVICES as METAL_DEVICES
from npu_cli.main import main
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, options_of
from npu_compiler.errors import CompileError, InputError
from npu_compiler.lowering.candidates import Candidate, Kept, best_candidates
from npu_compiler.lowering.device_model import GENERIC, DeviceModel, scaling
from npu_compiler.lowering.target import target_named
from npu_runtime import DAGExecutor, Device

ROOT = Path(__file__).parents[2]
MODELS = {"cuda": CUDA_DEVICES, "metal": METAL_DEVICES}
EACH = [(target, name) for target, models in MODELS.items() for name in models.names]
each_device = pytest.mark.parametrize(("target", "name"), EACH, ids=[name for _, name in EACH])


class Images(torch.nn.Module):
    """A convolution of few channels, one whose windows overlap, one with a residual, a pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 64, 7, 2, 3)
        self.wide = torch.nn.Conv2d(64, 64, 3, padding=1)
        self.last = torch.nn.Conv2d(64, 128, 1)
        self.head = torch.nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = self.last(torch.relu(self.wide(x) + x))
        pooled: torch.Tensor = self.head(torch.nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return pooled


class Decoder(torch.nn.Module):
    """One layer of a decoder: a norm, products, attention over a cache, a gated product, a residual."""

    def __init__(self, size: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, torch.nn.LayerNorm(size)
        self.query, self.out = (torch.nn.Linear(size, size, bias=False) for _ in range(2))
        self.gate, self.up = (torch.nn.Linear(size, 4 * size, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(4 * size, size, bias=False)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rows, size = x.shape[1:]
        query = self.query(self.norm(x)).view(1, rows, self.heads, size // self.heads).transpose(1, 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
        x = x + self.out(mixed.transpose(1, 2).reshape(1, rows, size))
        gated: torch.Tensor = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return x + gated


@cache
def irs() -> dict[str, Any]:
    cache_ = torch.zeros(1, 4, 8192, 32)
    given = {
        "images": (Images(), (torch.zeros(8, 3, 112, 112),)),
        "decode": (Decoder(), (torch.zeros(1, 1, 128), cache_, cache_)),
        "prefill": (Decoder(), (torch.zeros(1, 300, 128), cache_, cache_)),
    }
    return {name: npu_compiler.extract(m.eval(), x, model_name=name).ir for name, (m, x) in given.items()}


def plans(target: str, name: str | None) -> Iterator[ExecutionPlan]:
    for ir in irs().values():
        yield npu_compiler.compile(ir, target, device=name).main


def launches(plan: ExecutionPlan) -> Iterator[tuple[str, KernelCall]]:
    """Each launch, with what its option requires."""
    for step in plan.steps:
        for option in options_of(step):
            yield from ((option.requires, call) for call in option.calls if isinstance(call, KernelCall))


@each_device
def test_programs_for_a_device_ask_for_nothing_that_it_lacks(target: str, name: str) -> None:
    model = MODELS[target].named(name, target)
    for plan in plans(target, name):
        for requires, call in launches(plan):
            assert call.shared_bytes <= model.shared_bytes
            assert call.block[0] * call.block[1] * call.block[2] <= model.core_threads
            if target == "cuda":
                assert requires == "cublas" or meets(requires, int(name.split("_")[1]))
                assert cluster_of(call) == (1, 1, 1) or "clusters" in model.instructions
                assert "tensor_maps" in model.instructions or not any(map_of(argument) for argument in call.args)


@pytest.mark.parametrize(("target", "name"), [(t, models.default) for t, models in MODELS.items()])
def test_the_default_is_a_device_like_others(target: str, name: str, tmp_path: Path) -> None:
    for number, device in enumerate((None, name)):
        npu_compiler.compile(irs(), target, device=device).save(tmp_path / f"{number}.npubin")
    assert (tmp_path / "0.npubin").read_bytes() == (tmp_path / "1.npubin").read_bytes()


def test_a_gpu_without_warpgroups_and_clusters_gets_kernels_without() -> None:
    texts = {
        name: "".join(kernel.text for plan in plans("cuda", name) for kernel in plan.kernels)
        for name in ("sm_80", "sm_90")
    }
    for word in ("multiply_64_rows", "attention_decode", "attention_prefill", "conv2d_window"):
        assert word in texts["sm_90"]
        assert word not in texts["sm_80"]


def test_more_cores_take_more_blocks() -> None:
    def blocks(kernel: str, target: str, device: str) -> int:
        plan = npu_compiler.compile(irs()["decode"], target, device=device).main
        grids = [prod(call.grid) for _, call in launches(plan) if plan.kernels[call.kernel].entry == kernel]
        return max(grids)

    assert blocks("attention", "metal", "apple_m1") < blocks("attention", "metal", "apple_m4_max")
    assert blocks("matvec", "cuda", "sm_75") < blocks("matvec", "cuda", "sm_80")


def test_a_device_that_nobody_knows_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(CompileError, match=r"given the device 'sm_12', the target 'cuda' knows sm_100, sm_70, .*sm_90"):
        npu_compiler.compile(irs()["images"], "cuda", device="sm_12")
    with pytest.raises(CompileError, match=r"given the device 'sm_80', the target 'metal' knows apple_m1, .*apple_m4"):
        npu_compiler.compile(irs()["images"], device="sm_80")
    with pytest.raises(CompileError, match="'cuda' knows"):
        npu_compiler.partition(irs()["images"], target="cuda", device="h200")
    with pytest.raises(CompileError, match="given the device 80, the target 'cuda' knows"):
        npu_compiler.compile(irs()["images"], "cuda", device=80)  # type: ignore[arg-type]


def test_partitions_are_compiled_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def compile_(parts: Any, target: str, device: str | None = None) -> Any:
        seen.append(device)
        return npu_compiler.compile(parts, target, device=device)

    monkeypatch.setattr("npu_model.dag_executor.compile", compile_)
    own = [npu_compiler.partition(irs()["decode"], target="metal", device=name) for name in ("apple_m2", None)]
    DAGExecutor(own[0], Device.for_target("metal"))
    assert seen == ["apple_m2"]
    with pytest.raises(InputError, match="for the devices apple_m2, the default, expected one"):
        DAGExecutor({"a": own[0], "b": own[1]}, Device.for_target("metal"))


def test_the_command_line_compiles_for_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "decode.json"
    path.write_text(json.dumps(irs()["decode"]))
    assert main(["compile", str(path), "--target", "cuda", "--device", "sm_80"]) == 0
    expected = npu_compiler.compile(irs()["decode"], "cuda", device="sm_80")
    expected.save(tmp_path / "expected.npubin")
    assert (tmp_path / "decode.npubin").read_bytes() == (tmp_path / "expected.npubin").read_bytes()
    assert main(["partition", str(path), "--target", "cuda", "--device", "sm_7"]) != 0
    assert "sm_70" in capsys.readouterr().err


@each_device
def test_data_tell_datasheets_from_estimates(target: str, name: str) -> None:
    data = json.loads(files(f"{target}_compiler.devices").joinpath(f"{name}.json").read_text())
    model = MODELS[target].named(name, target)
    assert model.estimated == set(data.get("estimated", {}))
    assert not data["datasheet"].keys() & data.get("estimated", {}).keys()
    assert "on" in data.get("fitted", {"on": ""})
    facts = {**data["datasheet"], **data.get("estimated", {})}
    assert all(getattr(model, fact) == value > 0 for fact, value in facts.items())
    assert model.description
    assert target_named(target, name).device is model


@dataclass(frozen=True)
class _Costs:
    tiles: tuple[_Cost, ...]
    bytes_a_clock: float = scaling("memory_a_clock")


@dataclass(frozen=True)
class _Cost:
    rows: int
    products: int = scaling("core_products")


def test_constants_of_another_device_are_brought_to_this_one() -> None:
    families = {"family": {"tiles": [{"rows": 64, "products": 800}], "bytes_a_clock": 50.0}}
    first = DeviceModel("first", memory_gbs=100, clock_mhz=1000, core_products=1024, families=families)
    second = DeviceModel("second", memory_gbs=100, clock_mhz=2000, core_products=512, like=first)
    assert second.constants("family", _Costs) == _Costs((_Cost(64, 400),), 25.0)
    assert first.constants("family", _Costs) == _Costs((_Cost(64, 800),), 50.0)
    assert second.constants("family", _Costs) is second.constants("family", _Costs)


@pytest.mark.parametrize("wrong", [{}, {"tiles": [], "bytes_a_clock": 1, "more": 1}, {"tiles": 3, "bytes_a_clock": 1}])
def test_constants_that_are_not_what_they_should_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(CompileError, match="the device 'd', 'family'"):
        DeviceModel("d", families={"family": wrong}).constants("family", _Costs)
    with pytest.raises(CompileError, match="is like no other"):
        GENERIC.constants("family", _Costs)


def test_few_candidates_are_kept_and_one_that_every_device_runs() -> None:
    candidates = [Candidate("first", name, time, "special") for name, time in {"a": 5, "b": 1, "c": 1}.items()]
    candidates += [Candidate("second", name, time) for name, time in {"d": 9, "e": 2}.items()]

    def names(close: float, most: int) -> str:
        return "".join(each.sizes for each in best_candidates(candidates, Kept(close, most)))

    assert names(1.0, 4) == "bce"
    assert names(2.0, 4) == "bce"
    assert names(9.0, 9) == "bcead"
    assert names(9.0, 1) == "be"


def test_predicted_times_are_those_of_the_device() -> None:
    """The same product takes an older GPU longer, and a candidate's time is in microseconds on both."""
    asked = Asked(4096, 4096, 4096)
    times = {
        name: min(each.microseconds for each in warp_candidates(asked, CUDA_DEVICES.named(name, "cuda")))
        for name in ("sm_75", "sm_80", "sm_90")
    }
    assert times["sm_75"] > times["sm_80"] > times["sm_90"]
    for name, time in times.items():
        model = CUDA_DEVICES.named(name, "cuda")
        assert 4096**3 / model.products_a_microsecond < time < 3 * 4096**3 / model.products_a_microsecond


def test_a_target_takes_a_model_of_a_device_that_has_no_name() -> None:
    model = CUDA_DEVICES.named("sm_80", "cuda")
    assert CUDATarget(model).device is model
    assert all(not tiling.requires for tiling in close_tilings(Asked(512, 512, 512), model, warpgroups=True))
    assert WarpCosts.of(model).traffic_bytes != WarpCosts.of(CUDA_DEVICES.named("sm_90", "cuda")).traffic_bytes


FACTS = {"cores", "shared_bytes", "core_shared_bytes", "clock_mhz"}


def test_no_source_of_a_target_holds_a_number_of_one_device() -> None:
    """Numbers of cores, clocks and sizes of shared memory are in the data of devices alone."""
    numbers = set[int]()
    for target, models in MODELS.items():
        for name in models.names:
            numbers |= {getattr(models.named(name, target), fact) for fact in FACTS}
    numbers = {number for number in numbers if number > 100 and number.bit_count() > 1}  # others may mean anything
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value}"
        for folder in ("cuda_compiler", "metal_compiler", "npu_compiler/lowering")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value in numbers
    ]
    assert not found
    assert {132, 232448, 1980} <= numbers
    for package in ("cuda_compiler", "metal_compiler"):
        for path in (ROOT / package).rglob("*.py"):
            assert not re.search(r"MULTIPROCESSORS|\b22[78] \* 1024\b", path.read_text()), path
