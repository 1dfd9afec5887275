"""Weights: files of every kind, recipes, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from npu_compiler.artifact.recipes import WeightInput, WeightRecipe
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, INT64, dtype
from npu_compiler.errors import WeightError
from npu_compiler.tensor.layout import BufferSpec, Layout, dense
from npu_runtime import Device, Weights, load_weights
from tests.runtime.plans import SHAPE, axpy_program

VALUES = np.linspace(-2, 2, 20, dtype=np.float32).reshape(SHAPE)
NAME = "layer.weight"


def saved(path: Path, **tensors: torch.Tensor) -> Path:
    save_file({name.replace("_", "."): tensor for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return path


def program_of(*recipes: WeightRecipe) -> CompiledProgram:
    return replace(axpy_program(), recipes=recipes)


def content(weights: Weights, name: str, kind: Any = np.float16) -> NDArray[Any]:
    return weights[name].reading().view(kind)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "float64"])
def test_a_file_of_any_floating_point_type(device: Device, tmp_path: Path, kind: str) -> None:
    tensor = torch.from_numpy(VALUES).to(getattr(torch, kind))
    path = saved(tmp_path / "w.safetensors", layer_weight=tensor, other=torch.zeros(3))
    weights = load_weights(path, axpy_program(), device)
    assert (list(weights), len(weights), weights.nbytes) == (["w"], 1, 40)
    np.testing.assert_array_equal(content(weights, "w"), tensor.half().numpy().ravel())


def test_bfloat16_stays_bfloat16(device: Device, tmp_path: Path) -> None:
    tensor = torch.full(SHAPE, 1e30, dtype=torch.bfloat16)  # out of the range of float16
    path = saved(tmp_path / "w.safetensors", layer_weight=tensor)
    recipe = WeightRecipe(BufferSpec("w", BFLOAT16, BFLOAT16, dense(SHAPE)), (WeightInput(NAME, SHAPE, "bfloat16"),))
    weights = load_weights(str(path), program_of(recipe), device)
    np.testing.assert_array_equal(content(weights, "w", np.int16), tensor.view(torch.int16).numpy().ravel())


def test_integers_keep_their_values_in_a_narrower_type(device: Device, tmp_path: Path) -> None:
    path = saved(tmp_path / "w.safetensors", table=torch.tensor([3, -7, 2**31 - 1]))
    recipe = WeightRecipe(BufferSpec("t", INT32, INT64, dense((3,))), (WeightInput("table", (3,), "int64"),))
    weights = load_weights(path, program_of(recipe), device)
    np.testing.assert_array_equal(content(weights, "t", np.int32), [3, -7, 2**31 - 1])


def test_scalars_and_empty_tensors(device: Device, tmp_path: Path) -> None:
    path = saved(tmp_path / "w.safetensors", scalar=torch.tensor(2.5), empty=torch.zeros(0, 4))
    shapes: dict[str, tuple[int, ...]] = {"scalar": (), "empty": (0, 4)}
    recipes = [
        WeightRecipe(BufferSpec(name, FLOAT16, FLOAT32, dense(shape)), (WeightInput(name, shape, "float32"),))
        for name, shape in shapes.items()
    ]
    weights = load_weights(path, program_of(*recipes), device)
    np.testing.assert_array_equal(content(weights, "scalar"), [2.5])
    assert weights["empty"].nbytes == 0


def test_recipes_fold_pad_and_reorder(device: Device) -> None:
    weight = np.random.default_rng(0).standard_normal((2, 3, 1, 1)).astype(np.float32)
    mean, variance = np.array([1, -1], np.float32), np.array([1e-4, 9], np.float32)
    layout = Layout((2, 3, 1, 1), (2, 4, 1, 1), (2, 3, 1, 0))
    inputs = (WeightInput("conv.weight", weight.shape, "float32"), WeightInput("bn.var", (2,), "float32"))
    recipes = (
        WeightRecipe(BufferSpec("folded", FLOAT32, FLOAT32, layout), inputs, "fold_weight", (("eps", 1e-5),)),
        WeightRecipe(
            BufferSpec("bias", FLOAT32, FLOAT32, dense((2,))),
            (WeightInput("bn.mean", (2,), "float32"), inputs[1]),
            "fold_bias",
            (("eps", 1e-5),),
        ),
    )
    weights = load_weights({"conv.weight": weight, "bn.mean": mean, "bn.var": variance}, program_of(*recipes), device)
    scale = 1 / np.sqrt(variance.astype(np.float64) + 1e-5)
    expected = np.zeros((4, 2))
    expected[:3] = (weight[:, :, 0, 0] * scale[:, None]).T
    np.testing.assert_allclose(content(weights, "folded", np.float32).reshape(4, 2), expected, rtol=1e-7)
    np.testing.assert_allclose(content(weights, "bias", np.float32), -mean * scale, rtol=1e-7)


def _sharded(folder: Path, **changes: str) -> Path:
    saved(folder / "a.safetensors", layer_weight=torch.from_numpy(VALUES))
    saved(folder / "b.safetensors", other=torch.zeros(3))
    index = {"weight_map": {NAME: "a.safetensors", "other": "b.safetensors", **changes}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_folder_of_shards(device: Device, tmp_path: Path) -> None:
    weights = load_weights(_sharded(tmp_path), axpy_program(), device)
    np.testing.assert_array_equal(content(weights, "w"), VALUES.astype(np.float16).ravel())


def test_a_folder_of_one_file(device: Device, tmp_path: Path) -> None:
    saved(tmp_path / "model.safetensors", layer_weight=torch.from_numpy(VALUES))
    assert len(load_weights(tmp_path, axpy_program(), device)) == 1


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("b.safetensors", r"places 'layer.weight' in 'b.safetensors', which does not hold it"),
        ("c.safetensors", r"cannot read '.*c.safetensors': No such file"),
        ("../a.safetensors", r"expected a file beside the index"),
        ("", r"expected a file beside the index|no regular file"),
    ],
)
def test_an_index_that_is_wrong_is_refused(device: Device, tmp_path: Path, place: str, message: str) -> None:
    folder = _sharded(tmp_path, **{NAME: place})
    with pytest.raises(WeightError, match=message):
        load_weights(folder, axpy_program(), device)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 5000])
def test_an_index_that_is_none_is_refused(device: Device, tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightError, match="index"):
        load_weights(tmp_path, axpy_program(), device)


def test_a_folder_without_weights_is_refused(device: Device, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"with 0 \.safetensors files and 0 indices, expected one file"):
        load_weights(tmp_path, axpy_program(), device)


def test_a_file_that_is_not_there_is_refused(device: Device, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="No such file or directory; give the path"):
        load_weights(tmp_path / "none.safetensors", axpy_program(), device)


def test_a_missing_weight_is_named_with_near_matches(device: Device) -> None:
    given = {"layer.weigth": VALUES, "bias": VALUES}
    with pytest.raises(
        WeightError, match=r"(?s)1 are missing:\n  'layer.weight', near matches: layer.weigth\nGive the"
    ):
        load_weights(given, axpy_program(), device)
    inputs = tuple(WeightInput(f"t{n}", (1,), "float32") for n in range(12))
    recipe = WeightRecipe(BufferSpec("w", FLOAT16, FLOAT32, dense((12,))), inputs, "concatenate", (("axis", 0),))
    with pytest.raises(WeightError, match=r"(?s)given 0 tensors, expected 12; 12 are missing:.*and 4 more"):
        load_weights({}, program_of(recipe), device)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (VALUES.T, r"'layer.weight': given shape \(5, 4\), expected \(4, 5\)"),
        (VALUES.ravel(), r"given shape \(20,\), expected \(4, 5\)"),
        (VALUES.astype(np.int64), "given dtype int64, expected float32"),
        (VALUES.astype(np.bool_), "given dtype bool, expected float32"),
        (VALUES.astype(np.complex64), "complex64"),
        (VALUES.tolist(), "given a list, expected a numpy array, a tensor of torch"),
        (np.full(SHAPE, 1e5, np.float32), "made of 'layer.weight': 'w': given values up to 1e.05 .* dtype='bfloat16'"),
        (np.full(SHAPE, 1e5, ml_dtypes.bfloat16), "given values up to 9.984e.04 .* dtype='bfloat16'"),
    ],
)
def test_a_weight_of_another_kind_is_refused(device: Device, array: Any, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        load_weights({NAME: array}, axpy_program(), device)


def test_integers_where_others_are_expected_are_refused(device: Device) -> None:
    recipe = WeightRecipe(BufferSpec("t", INT32, INT64, dense((1,))), (WeightInput("t", (1,), "int64"),))
    for array, message in (
        (np.zeros(1, np.int32), "given dtype int32, expected int64"),
        (np.array([2**40]), "integers"),
    ):
        with pytest.raises(WeightError, match=message):
            load_weights({"t": array}, program_of(recipe), device)


def test_infinite_weights_are_kept(device: Device) -> None:
    array = np.full(SHAPE, -np.inf, np.float32)
    assert np.isneginf(content(load_weights({NAME: array}, axpy_program(), device), "w")).all()


def test_a_recipe_whose_values_do_not_exist_is_refused(device: Device) -> None:
    inputs = tuple(WeightInput(name, (1,), "float32") for name in ("w", "var"))
    recipe = WeightRecipe(BufferSpec("f", FLOAT32, FLOAT32, dense((1,))), inputs, "fold_weight", (("eps", 0.0),))
    for variance in (0, -1):
        arrays = {"w": np.ones(1, np.float32), "var": np.full(1, variance, np.float32)}
        with pytest.raises(WeightError, match=f"'f', made of 'w', 'var': given a variance of {variance}") as refused:
            load_weights(arrays, program_of(recipe), device)
        assert "too large" not in str(refused.value)


def _header(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A safetensors file of `VALUES` whose header `change` has altered."""
    header: dict[str, Any] = {NAME: {"dtype": "F32", "shape": list(SHAPE), "data_offsets": [0, 80]}}
    replaced = change(header)
    text = replaced if isinstance(replaced, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + VALUES.tobytes()


def _entry(**changes: Any) -> bytes:
    return _header(lambda header: header[NAME].update(changes))


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no whole safetensors file"),
    "short": (b"1234", "no whole safetensors file"),
    "header past the end": ((1 << 20).to_bytes(8, "little") + b"{}", "with a header of 1048576"),
    "huge header": (b"\xff" * 100, "with a header of 18446744073709551615"),
    "text": (b"this is no weight file at all, but some text", "no whole safetensors file"),
    "not JSON": (_header(lambda _: b"{'x'}"), "not JSON"),
    "not UTF-8": (_header(lambda _: b'{"\xff": 1}'), "not JSON"),
    "nested": (_header(lambda _: b"[" * 100_000), "not JSON"),
    "a list": (_header(lambda _: b"[]"), "not a JSON object"),
    "no entry": (_header(lambda header: header.update({NAME: 1})), "has no dtype, shape and data_offsets"),
    "no offsets": (_header(lambda header: header[NAME].pop("data_offsets")), "has no dtype, shape and data_offsets"),
    "one offset": (_entry(data_offsets=[0]), "has no dtype, shape and data_offsets"),
    "truncated": (_entry()[:-1], "lies at 0:80 of 79 bytes"),
    "past the end": (_entry(data_offsets=[4, 84]), "lies at 4:84 of 80 bytes"),
    "negative": (_entry(data_offsets=[-80, 0]), "lies at -80:0"),
    "reversed": (_entry(data_offsets=[80, 0]), "lies at 80:0"),
    "another size": (_entry(data_offsets=[0, 40]), "lies at 0:40"),
    "negative shape": (_entry(shape=[-4, -5]), r"has the shape \[-4, -5\]"),
    "fractional shape": (_entry(shape=[4.0, 5]), "has the shape"),
    "boolean shape": (_entry(shape=[True, 20]), "has the shape"),
    "many dimensions": (_entry(shape=[1] * 78 + [4, 5]), "has the shape"),
    "an empty tensor of a huge size": (_entry(shape=[0, 1 << 63], data_offsets=[0, 0]), "has the shape"),
    "an empty tensor of huge sizes": (_entry(shape=[0, 1 << 40, 1 << 40], data_offsets=[0, 0]), "has the shape"),
    "unknown dtype": (_entry(dtype="F4"), "dtype F4, expected one of BOOL, U8"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused(device: Device, tmp_path: Path, name: str) -> None:
    data, message = DAMAGED[name]
    path = tmp_path / "w.safetensors"
    path.write_bytes(data)
    with pytest.raises(WeightError, match=message):
        load_weights(path, axpy_program(), device)


def test_a_file_that_is_whole_is_read(device: Device, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(_entry())
    assert len(load_weights(tmp_path / "w.safetensors", axpy_program(), device)) == 1


def test_every_dtype_of_the_table_is_read(device: Device, tmp_path: Path) -> None:
    kinds = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    save_file({name: torch.ones(3, dtype=getattr(torch, name)) for name in kinds}, tmp_path / "w.safetensors")
    recipes = [
        WeightRecipe(BufferSpec(name, dtype(name), dtype(name), dense((3,))), (WeightInput(name, (3,), name),))
        for name in kinds
    ]
    weights = load_weights(tmp_path / "w.safetensors", program_of(*recipes), device)
    for name in kinds:
        np.testing.assert_array_equal(content(weights, name, dtype(name).numpy), np.ones(3))


def test_what_draws_the_bar_is_not_imported_without_one(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    for stream in (sys.stderr, None):
        monkeypatch.setattr(sys, "stderr", stream)
        assert len(load_weights({NAME: VALUES}, axpy_program(), device)) == 1


def test_a_progress_bar_is_shown_on_a_terminal_only(
    device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_weights({NAME: VALUES}, axpy_program(), device)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    load_weights({NAME: VALUES}, axpy_program(), device)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "loading weights" in printed.err
