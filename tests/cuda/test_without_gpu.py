"""What a machine without a CUDA device can show: imports, layouts, refusals, the kernel cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from cuda_compiler import compile_subgraph, is_cuda_op_supported
from cuda_compiler.devices import DEVICES
from cuda_compiler.target import CUDATarget
from cuda_compiler.tiles.lowering import close_tilings
from cuda_compiler.tiles.tiling import Asked
from cuda_compiler.tiles.warps import WarpCosts, WarpTile
from cuda_runtime import CUDABackend, kernel_cache
from cuda_runtime.capability import architecture_name, meets
from cuda_runtime.cupy_api import cupy
from cuda_runtime.given import Span, span
from npu_compiler.artifact.plan import KernelCall, KernelSource, options_of
from npu_compiler.errors import DeviceError, MissingDependencyError
from npu_runtime import Device
from tests.cuda.kernels import check_plan_compiles
from tests.ops.cases import case, floats


def test_importing_the_packages_imports_no_gpu_library() -> None:
    statement = (
        "import sys, cuda_compiler.target, cuda_runtime; "
        "print({'cupy', 'torch', 'cuda'} & {name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_missing_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    cupy.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"npu-compiler\[cuda\]"):
        CUDABackend()


def test_a_folder_named_cupy_is_none(tmp_path: Path) -> None:
    (tmp_path / "cupy").mkdir()
    statement = "import npu_runtime; print(npu_runtime.Device().name)"
    run = [sys.executable, "-c", statement]
    paths = [str(Path(__file__).parents[2]), str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(run, capture_output=True, text=True, env=given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_device_that_is_not_there_is_refused() -> None:
    with pytest.raises((DeviceError, MissingDependencyError)):
        Device("cuda:99")


def test_layouts_are_dense_and_images_channels_last() -> None:
    target = CUDATarget()
    assert target.layout((2, 5, 7), "plain").strides == (35, 7, 1)
    image = target.layout((2, 3, 4, 5), "image")
    assert (image.strides, image.size) == ((60, 1, 15, 3), 120)


@pytest.mark.parametrize(
    ("shape", "padded"),
    [
        ((8, 64, 3, 3), (8, 64, 3, 3)),
        ((8, 3, 7, 7), (8, 4, 7, 8)),
        ((8, 20, 3, 3), (8, 24, 3, 3)),
        ((6, 1, 3, 3), (6, 1, 3, 3)),  # filters of one channel lie side by side
    ],
)
def test_taps_of_a_weight_fill_chunks(shape: tuple[int, ...], padded: tuple[int, ...]) -> None:
    assert CUDATarget().layout(shape, "conv_weight").alloc_shape == padded


def test_compiling_a_subgraph_and_asking_for_support() -> None:
    ir: dict[str, Any] = case("add.Tensor", floats(4, 8), floats(8)).ir(__import__("torch").float16)
    assert compile_subgraph(ir).target == "cuda"
    assert is_cuda_op_supported(ir["nodes"][-1])


MODEL = DEVICES.named("sm_90", "cuda")


@pytest.mark.parametrize("tile", WarpCosts.of(MODEL).tiles, ids=lambda t: f"{t.rows}x{t.columns}x{t.depth}x{t.warps_n}")
def test_tilings_fit_every_gpu(tile: WarpTile) -> None:
    for name in DEVICES.names:
        assert tile.tiling.shared_bytes <= DEVICES.named(name, "cuda").shared_bytes
    assert tile.tiling.threads * tile.tiling.blocks <= 1024


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 8), (49, 512, 4608), (3211264, 64, 224), (4096, 4096, 4096)])
def test_splits_leave_every_block_some_steps(m: int, n: int, k: int) -> None:
    tiling = close_tilings(Asked(m, n, k), MODEL, warpgroups=False)[0]
    assert tiling.splits == 1 or tiling.splits * tiling.depth * 2 <= k + tiling.depth


@pytest.mark.parametrize(
    ("requires", "fitting"),
    [("", {70, 80, 90, 100}), ("sm_80", {80, 90, 100}), ("sm_90", {90, 100}), ("sm_90a", {90})],
)
def test_options_run_on_the_devices_that_meet_them(requires: str, fitting: set[int]) -> None:
    assert {capability for capability in (70, 80, 90, 100) if meets(requires, capability)} == fitting


@pytest.mark.parametrize("requires", ["sm_", "sm_9", "sm90", "metal4", "sm_90ab", "sm_٩٠"])
def test_requirement_that_nobody_knows_is_refused(requires: str) -> None:
    with pytest.raises(DeviceError, match=f"requires '{requires}'"):
        meets(requires, 90)


def test_hopper_has_an_architecture_of_its_own() -> None:
    assert [architecture_name(capability) for capability in (70, 90, 100)] == ["sm_70", "sm_90a", "sm_100"]


def test_kernel_cache_survives_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path))
    compiled: list[str] = []

    def compile_kernel(text: str, entry: str, architecture: int) -> bytes:
        compiled.append(entry)
        return text.encode() + bytes([architecture])

    monkeypatch.setattr(kernel_cache, "compile_kernel", compile_kernel)
    monkeypatch.setattr(kernel_cache, "nvrtc_version", lambda: (12, 9))
    kernel = KernelSource("k", "text")
    first = kernel_cache.compiled_kernels([kernel], 90)
    assert kernel_cache.compiled_kernels([kernel], 90) == first
    assert compiled == ["k"]
    assert kernel_cache.compiled_kernels([kernel], 80) != first
    for path in (tmp_path / "cuda").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert kernel_cache.compiled_kernels([kernel], 90) == first
    assert compiled == ["k", "k", "k"]


def test_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("NPU_CACHE_DIR", str(blocked))
    monkeypatch.setattr(kernel_cache, "compile_kernel", lambda *_: b"code")
    monkeypatch.setattr(kernel_cache, "nvrtc_version", lambda: (12, 9))
    assert kernel_cache.compiled_kernels([KernelSource("k", "text")], 90) == [b"code"]


@pytest.mark.parametrize(("outputs", "grid"), [(64, (132, 1, 1)), (128, (66, 2, 1)), (192, (44, 3, 1))])
def test_overlapping_windows_fill_all_multiprocessors(outputs: int, grid: tuple[int, int, int]) -> None:
    module = torch.nn.Conv2d(64, outputs, 3, padding=1, bias=False).eval()
    ir = npu_compiler.extract(module, torch.zeros(64, 64, 56, 56), model_name="overlap").ir
    plan = npu_compiler.compile(ir, target="cuda").main
    calls = [call for step in plan.steps for option in options_of(step) for call in option.calls]
    found = [c.grid for c in calls if isinstance(c, KernelCall) and plan.kernels[c.kernel].entry == "conv2d_overlap"]
    assert found == [grid]


@pytest.mark.parametrize(("name", "architecture"), [("sm_75", 75), ("sm_80", 80)])
def test_programs_for_other_gpus_compile(name: str, architecture: int) -> None:
    linear = case("linear.default", floats(300, 1024), floats(264, 1024))
    image = case("conv2d.default", floats(2, 64, 20, 20), floats(64, 64, 3, 3), None, [1, 1], [1, 1])
    q, kv = floats(1, 8, 4, 64), floats(1, 2, 1000, 64)
    attention = case("scaled_dot_product_attention.default", q, kv, kv, enable_gqa=True)
    for each in (linear, image, attention):
        plan = npu_compiler.compile(each.ir(torch.float16), "cuda", device=name).main
        assert plan.kernels
        check_plan_compiles(plan, architecture)


def test_memory_of_tensors_overlaps_where_an_address_is_in_both() -> None:
    first, second, third = Span(256, 512), Span(511, 600), Span(512, 600)
    assert first.overlaps(second)
    assert second.overlaps(first)
    assert not first.overlaps(third)
    assert span(np.zeros(3)).nbytes == 0  # of the host
