"""Mistakes seen in compilers of this kind, each with a test of its name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import npu_compiler
from npu_compiler.errors import UnsupportedOpError
from npu_runtime import Device, Executor, load_weights
from tests.mistakes.model import Model, buffers, close

ROOT = Path(__file__).parents[2]


def test_division_by_a_scalar_is_no_multiplication(device: Device, tmp_path: Path) -> None:
    model = Model()
    (result,) = model.run(device, tmp_path, model.call("div.Tensor", model.input("x", 3, 8), 2.0))
    close(result, model["x"] / 2)


def test_alpha_of_an_addition_counts(device: Device, tmp_path: Path) -> None:
    model = Model()
    x, y = model.input("x", 3, 8), model.input("y", 3, 8)
    (result,) = model.run(device, tmp_path, model.call("add.Tensor", x, y, alpha=3))
    close(result, model["x"] + 3 * model["y"])


def test_cat_takes_all_three_tensors(device: Device, tmp_path: Path) -> None:
    model = Model()
    parts = [model.input(name, size, 4) for name, size in (("a", 1), ("b", 2), ("c", 3))]
    (result,) = model.run(device, tmp_path, model.call("cat.default", parts))
    close(result, torch.cat([model["a"], model["b"], model["c"]]))


def test_softmax_and_mean_over_the_first_dimension(device: Device, tmp_path: Path) -> None:
    model = Model()
    x = model.input("x", 5, 8)
    outputs = (model.call("softmax.int", x, 0), model.call("mean.dim", x, [0]))
    results = model.run(device, tmp_path, *outputs)
    close(results[0], torch.softmax(model["x"], 0))
    close(results[1], model["x"].mean(0))


@pytest.mark.parametrize("between", [None, "relu.default"])
def test_a_batch_norm_without_a_convolution_right_before_it_is_computed(
    between: str | None, device: Device, tmp_path: Path
) -> None:
    model = Model()
    x = model.input("x", 2, 6, 4, 4)
    if between:
        x = model.call(between, model.call("conv2d.default", x, model.weight("conv", 6, 6, 1, 1)))
    statistics = [model.weight(name, 6) for name in ("gamma", "beta", "mean")]
    variance = model.weight("variance", values=torch.rand(6) + 0.5)
    normed = model.call("batch_norm.default", x, *statistics, variance, False, 0.1, 1e-5, True)
    (result,) = model.run(device, tmp_path, normed)
    before = torch.relu(F.conv2d(model["x"], model["conv"])) if between else model["x"]
    expected = F.batch_norm(before, model["mean"], model["variance"], model["gamma"], model["beta"])
    np.testing.assert_allclose(result, expected.numpy(), rtol=2e-3, atol=1e-2)


def _normed_convolution(model: Model, affine: bool = True) -> tuple[npu_compiler.CompiledProgram, torch.Tensor]:
    """conv2d without bias, then BatchNorm; the program, and what it should give."""
    x = model.input("x", 1, 3, 5, 5)
    convolved = model.call("conv2d.default", x, model.weight("conv", 6, 3, 3, 3))
    scale = [model.weight(name, 6) if affine else None for name in ("gamma", "beta")]
    mean, variance = model.weight("mean", 6), model.weight("variance", values=torch.rand(6) + 0.5)
    program = model.compile(model.call("batch_norm.default", convolved, *scale, mean, variance, False, 0.1, 1e-5, True))
    gamma, beta = (model.tensors.get(name) for name in ("gamma", "beta"))
    expected = F.batch_norm(F.conv2d(model["x"], model["conv"]), model["mean"], model["variance"], gamma, beta)
    return program, expected


def _run(model: Model, program: npu_compiler.CompiledProgram, device: Device, folder: Path) -> np.ndarray:
    from safetensors.torch import save_file

    names = {source.name for recipe in program.recipes for source in recipe.inputs}
    save_file({name: model[name].float() for name in names}, folder / "weights.safetensors")
    weights = load_weights(folder / "weights.safetensors", program, device)
    (result,) = Executor(program, device).run(buffers(program, model.tensors, device), weights).values()
    return result.to_numpy(spec=program.output_specs[0])


def test_the_bias_that_folding_makes_is_read(device: Device, tmp_path: Path) -> None:
    model = Model()
    program, expected = _normed_convolution(model)
    assert len(program.main.steps) == 1
    np.testing.assert_allclose(_run(model, program, device, tmp_path), expected.numpy(), rtol=2e-3, atol=1e-2)


def test_the_bias_that_folding_makes_asks_for_no_key_that_the_file_lacks() -> None:
    program, _ = _normed_convolution(Model())
    keys = {source.name for recipe in program.recipes for source in recipe.inputs}
    assert keys == {"conv", "gamma", "beta", "mean", "variance"}


def test_a_batch_norm_without_weight_and_bias(device: Device, tmp_path: Path) -> None:
    model = Model()
    program, expected = _normed_convolution(model, affine=False)
    np.testing.assert_allclose(_run(model, program, device, tmp_path), expected.numpy(), rtol=2e-3, atol=1e-2)


def test_a_vector_added_to_rows_is_not_read_past_its_end(device: Device, tmp_path: Path) -> None:
    model = Model()
    x, b = model.input("x", 4, 8), model.input("b", 8)
    fused = model.call("relu.default", model.call("add.Tensor", x, b))
    (result,) = model.run(device, tmp_path, fused)
    close(result, torch.relu(model["x"] + model["b"]))


def test_a_mask_broadcast_over_heads(device: Device, tmp_path: Path) -> None:
    model = Model()
    x, mask = model.input("x", 2, 3, 4, 4), model.input("mask", 2, 1, 4, 4)
    (result,) = model.run(device, tmp_path, model.call("softmax.int", model.call("add.Tensor", x, mask), -1))
    close(result, torch.softmax(model["x"] + model["mask"], -1))


def test_the_epsilon_of_an_rms_norm_counts(device: Device, tmp_path: Path) -> None:
    model = Model()
    x = model.input("x", values=torch.randn(3, 8, generator=torch.Generator().manual_seed(1)) * 3e-3)
    square = model.call("mean.dim", model.call("pow.Tensor_Scalar", x, 2), [-1], True)
    scaled = model.call("mul.Tensor", x, model.call("rsqrt.default", model.call("add.Tensor", square, 1e-5)))
    (result,) = model.run(device, tmp_path, scaled)
    close(result, model["x"] * torch.rsqrt(model["x"].square().mean(-1, keepdim=True) + 1e-5))


def test_a_bfloat16_model_stays_bfloat16(device: Device) -> None:
    model = Model(torch.bfloat16)
    builder = model.builder
    x, w = builder.input("x", (2, 8), torch.bfloat16), builder.weight("w", (4, 8), torch.bfloat16)
    program = npu_compiler.compile(builder.build(builder.call("aten.linear.default", x, w)))
    assert program.compute_dtype == "bfloat16"
    assert {spec.dtype.name for spec in (*program.input_specs, *program.output_specs)} == {"bfloat16"}


@pytest.mark.parametrize("compute", [torch.float16, torch.bfloat16])
def test_the_rotary_angle_of_a_late_position_is_exact(compute: torch.dtype, device: Device, tmp_path: Path) -> None:
    model = Model(compute)
    positions = model.input("positions", values=torch.tensor([0, 2049, 5001, 30001]))
    frequencies = model.input("frequencies", values=torch.tensor([1.0, 0.5, 0.125]))
    spread = model.call("to.dtype", model.call("unsqueeze.default", positions, 1), torch.float32)
    (result,) = model.run(device, tmp_path, model.call("cos.default", model.call("mul.Tensor", spread, frequencies)))
    close(result, torch.cos(model["positions"].double()[:, None] * model["frequencies"]), compute)


def test_every_kernel_file_is_used() -> None:
    """A kernel that nobody collects is one that something slower stands in for."""
    folders = ROOT / "metal_compiler", ROOT / "npu_compiler/lowering"  # which declares what targets share
    sources = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    for file in files("metal_compiler").joinpath("kernels").iterdir():
        if file.name.endswith(".metal"):
            entry = f'"{file.name.removesuffix(".metal")}"'
            assert entry in sources or file.name in sources, f"{file.name} is used by nobody"


def test_an_op_that_is_supported_with_other_attributes_is_refused() -> None:
    model = Model()
    x = model.input("x", 3, 8)
    with pytest.raises(UnsupportedOpError, match="training=True"):
        model.compile(model.call("rrelu.default", x, 0.1, 0.3, True))


def test_a_batch_of_two_differs_image_by_image(device: Device, tmp_path: Path) -> None:
    model = Model()
    x, weight = model.input("x", 2, 3, 6, 6), model.weight("w", 4, 3, 3, 3)
    convolved = model.call("relu.default", model.call("conv2d.default", x, weight))
    (result,) = model.run(device, tmp_path, model.call("max_pool2d.default", convolved, [2, 2]))
    expected = F.max_pool2d(torch.relu(F.conv2d(model["x"], model["w"])), 2)
    np.testing.assert_allclose(result, expected.numpy(), rtol=2e-3, atol=1e-2)
    assert not np.array_equal(result[0], result[1])


def test_adaptive_pooling_to_a_size_that_does_not_divide(device: Device, tmp_path: Path) -> None:
    model = Model()
    (result,) = model.run(
        device, tmp_path, model.call("adaptive_avg_pool2d.default", model.input("x", 1, 3, 7, 10), [3, 4])
    )
    close(result, F.adaptive_avg_pool2d(model["x"], (3, 4)))


def test_indices_stay_integers(device: Device, tmp_path: Path) -> None:
    """float16 holds no odd number above 2048."""
    model = Model()
    table = model.input("table", 3100, 2)
    index = model.input("index", values=torch.tensor([3001, 2049, 7]))
    results = model.run(
        device,
        tmp_path,
        model.call("embedding.default", table, index),
        model.call("index_select.default", table, 0, index),
    )
    for result in results:
        close(result, model["table"][model["index"]])


def test_integers_converted_to_float_change_their_bytes(device: Device, tmp_path: Path) -> None:
    model = Model()
    x = model.input("x", values=torch.tensor([1, 2, -3, 500]))
    (result,) = model.run(device, tmp_path, model.call("to.dtype", x, torch.float32))
    close(result, model["x"])


def test_inputs_may_be_called_anything(device: Device, tmp_path: Path) -> None:
    model = Model()
    cache = model.input("what the model remembers", 2, 6, 4)
    position = model.input("arg2.1", values=torch.tensor([4]))
    new = model.input("out", 2, 1, 4)
    (result,) = model.run(device, tmp_path, model.call("index_copy.default", cache, 1, position, new))
    cache_, new_ = model["what the model remembers"], model["out"]
    close(result, torch.index_copy(cache_, 1, model["arg2.1"], new_))


def test_an_integer_buffer_holds_integers(device: Device, tmp_path: Path) -> None:
    model = Model()
    x = model.input("x", values=torch.arange(100, dtype=torch.int32))
    total = model.call("add.Tensor", x, x)
    (spec,) = model.compile(total).input_specs
    assert spec.nbytes == 400
    (result,) = model.run(device, tmp_path, total)
    np.testing.assert_array_equal(result, 2 * np.arange(100))


def test_scale_and_shared_heads_after_defaulted_arguments_count(device: Device, tmp_path: Path) -> None:
    model = Model()
    q, k, v = model.input("q", 1, 4, 5, 16), model.input("k", 1, 2, 5, 16), model.input("v", 1, 2, 5, 16)
    attended = model.call("scaled_dot_product_attention.default", q, k, v, scale=0.7, enable_gqa=True)
    (result,) = model.run(device, tmp_path, attended)
    close(result, F.scaled_dot_product_attention(model["q"], model["k"], model["v"], scale=0.7, enable_gqa=True))


def test_an_empty_tensor(device: Device, tmp_path: Path) -> None:
    model = Model()
    x = model.input("x", 0, 4)
    outputs = (
        model.call("relu.default", x),
        model.call("sum.dim_IntList", x, [0]),
        model.call("mean.dim", x, [1]),
        model.call("softmax.int", x, 1),
        model.call("linear.default", x, model.input("w", 3, 4)),
    )
    results = model.run(device, tmp_path, *outputs)
    assert [result.shape for result in results] == [(0, 4), (4,), (0,), (0, 4), (0, 3)]
    assert not results[1].any()


def test_a_program_of_empty_outputs_survives_a_file(device: Device, tmp_path: Path) -> None:
    model = Model()
    program = model.compile(model.call("relu.default", model.input("x", 0, 4)))
    program.save(tmp_path / "empty.npubin")
    loaded = npu_compiler.CompiledProgram.load(tmp_path / "empty.npubin")
    (result,) = Executor(loaded, device).run(buffers(loaded, model.tensors, device)).values()
    assert result.to_numpy(spec=loaded.output_specs[0]).shape == (0, 4)


def test_the_second_call_gives_the_second_output(device: Device) -> None:
    model = Model()
    x = model.input("x", 3, 8)
    program = model.compile(model.call("softmax.int", model.call("tanh.default", x), 0))
    executor = Executor(program, device)
    spec = program.output_specs[0]
    for _ in range(2):
        (result,) = executor.run(buffers(program, model.tensors, device)).values()
        close(result.to_numpy(spec=spec), torch.softmax(torch.tanh(model["x"]), 0))
        model.tensors["x"] = -2 * model["x"]


def test_narrow_integers_wrap_inside_a_fused_kernel(device: Device, tmp_path: Path) -> None:
    model = Model()
    x = model.input("x", values=torch.tensor([0, 5, 250], dtype=torch.uint8))
    wrapped = model.call("bitwise_not.default", model.call("add.Tensor", x, 10))
    (result,) = model.run(device, tmp_path, model.call("to.dtype", wrapped, torch.float32))
    close(result, (~(model["x"] + 10)).double())


def test_a_reduction_of_a_reduction_reads_its_whole_row(device: Device, tmp_path: Path) -> None:
    model = Model()
    largest = model.call("amax.default", model.input("x", 6, 6), [0, 1], True)
    (result,) = model.run(device, tmp_path, model.call("sum.dim_IntList", largest, [0]))
    close(result, model["x"].amax().reshape(1))
