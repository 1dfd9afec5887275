"""Weights that are read in parts: what lies on the device is what whole arrays would have given, errors included."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from metal_runtime.backend import MetalBuffer
from npu_compiler.artifact.recipes import WeightInput, WeightRecipe
from npu_compiler.dtypes import ALL, BFLOAT16, FLOAT16, FLOAT32, DType, dtype
from npu_compiler.errors import WeightError
from npu_compiler.tensor.layout import BufferSpec, dense
from npu_runtime import Device, Weights, load_weights, weight_parts
from npu_runtime.host_tensors import as_array
from npu_runtime.safetensors_file import SafetensorsFile, open_safetensors
from npu_runtime.weight_values import all_finite, check_values
from tests.runtime.test_weights import program_of

FLOATS = [kind for kind in ALL if kind.is_float]
SMALL_PART, SMALL_STEP = 96, 40  # bytes


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and steps of a few elements, and no way around them."""
    monkeypatch.setattr(MetalBuffer, "part_bytes", SMALL_PART)
    monkeypatch.setattr(weight_parts, "STEP_BYTES", SMALL_STEP)


@pytest.fixture
def no_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a whole tensor of a file is asked for."""

    def refuse(_: object, name: str) -> None:
        raise AssertionError(f"'{name}' is read whole")

    monkeypatch.setattr(SafetensorsFile, "__getitem__", refuse)


def _file(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    save_file(dict(tensors), path)
    return path


def _recipe(transform: str, kind: DType, tensors: Mapping[str, torch.Tensor]) -> WeightRecipe:
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    shape = shapes[0] if transform == "identity" else (sum(shape[0] for shape in shapes), *shapes[0][1:])
    inputs = tuple(
        WeightInput(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    )
    return WeightRecipe(BufferSpec("w", kind, kind, dense(shape)), inputs, transform)


def _loaded(path: Path, recipe: WeightRecipe, device: Device) -> Weights:
    return load_weights(path, program_of(recipe), device)


def _random(shape: tuple[int, ...], kind: str, seed: int = 0) -> torch.Tensor:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return tensor.to(getattr(torch, kind))


CASES: dict[str, tuple[str, list[tuple[int, ...]]]] = {
    "one value": ("identity", [(1,)]),
    "scalar": ("identity", [()]),
    "a few parts": ("identity", [(7, 31)]),
    "one after another": ("concatenate", [(3, 5), (1, 5), (40, 5)]),
    "vectors": ("concatenate", [(3,), (70,), (1,)]),
    "empty among others": ("concatenate", [(0, 3), (9, 3), (0, 3)]),
    "in turns": ("interleave", [(9, 7), (9, 7)]),
    "three in turns, with more dimensions": ("interleave", [(4, 2, 3)] * 3),
    "scalars in turns": ("interleave", [(50,), (50,)]),
    "one row of each": ("interleave", [(1, 90), (1, 90)]),
    "one in turns with none": ("interleave", [(20, 6)]),
}


@pytest.mark.usefixtures("small_parts", "no_arrays")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("given", "made"), [(kind, kind) for kind in ALL] + [(FLOAT32, FLOAT16), (BFLOAT16, FLOAT16)])
def test_parts_give_what_the_recipe_gives(name: str, given: DType, made: DType, device: Device, tmp_path: Path) -> None:
    transform, shapes = CASES[name]
    tensors = {f"t{n}": _random(shape, given.name, n) for n, shape in enumerate(shapes)}
    recipe = _recipe(transform, made, tensors)
    if transform == "interleave" and shapes[0][0] > 1 and len(shapes) * prod(shapes[0][1:]) * made.size > SMALL_PART:
        pytest.skip("a row of each is more than a part")
    weights = _loaded(_file(tmp_path / "w.safetensors", tensors), recipe, device)
    arrays = [as_array(tensor) for tensor in tensors.values()]
    assert weights["w"].reading().tobytes() == recipe.apply(arrays).tobytes()
    assert weights.notes == ()


@given(st.data())
@settings(max_examples=60)
def test_a_recipe_computes_what_its_runs_say(data: st.DataObject) -> None:
    transform = data.draw(st.sampled_from(["identity", "concatenate", "interleave"]))
    row = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2)))
    rows = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=1 if transform == "identity" else 3))
    shapes = [(rows[0] if transform == "interleave" else n, *row) for n in rows]
    arrays = [_random(shape, "float32", n).numpy() for n, shape in enumerate(shapes)]
    expected = {
        "identity": lambda: arrays[0],
        "concatenate": lambda: np.concatenate(arrays),
        "interleave": lambda: np.stack(arrays, axis=1).reshape(sum(n for n, *_ in shapes), *row),
    }[transform]()
    inputs = tuple(WeightInput(f"t{n}", shape, "float32") for n, shape in enumerate(shapes))
    recipe = WeightRecipe(BufferSpec("w", FLOAT32, FLOAT32, dense(expected.shape)), inputs, transform)
    np.testing.assert_array_equal(recipe.compute(arrays), expected)
    assert recipe.runs is not None
    assert len(recipe.runs) == len(inputs)


@pytest.mark.parametrize(
    ("transform", "shapes", "shape"),
    [
        ("identity", [(2, 3)], (3, 2)),
        ("identity", [(2, 3), (2, 3)], (2, 3)),
        ("concatenate", [(2, 3), (2, 4)], (4, 3)),
        ("concatenate", [(), ()], (2,)),
        ("concatenate", [(2, 3), (2, 3)], (5, 3)),
        ("interleave", [(2, 3), (3, 3)], (5, 3)),
        ("fold_weight", [(2, 3), (2,)], (2, 3)),
        ("rotate", [(2, 3)], (2, 3)),
    ],
)
def test_what_is_not_only_put_in_its_place_has_no_runs(transform: str, shapes: Any, shape: Any) -> None:
    inputs = tuple(WeightInput(f"t{n}", given, "float32") for n, given in enumerate(shapes))
    assert WeightRecipe(BufferSpec("w", FLOAT32, FLOAT32, dense(shape)), inputs, transform).runs is None


@pytest.mark.parametrize("kind", [FLOAT16, BFLOAT16], ids=str)
def test_each_pattern_of_16_bits_is_known_as_finite_or_not(kind: DType) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    patterns = bits.view(kind.numpy)
    finite = np.isfinite(patterns if kind is FLOAT16 else (bits.astype(np.uint32) << 16).view(np.float32))
    assert all_finite(patterns[finite])
    assert not any(all_finite(patterns[n : n + 1]) for n in np.flatnonzero(~finite))
    assert all(all_finite(patterns[n : n + 1]) for n in np.flatnonzero(finite)[::37])


def test_a_signalling_nan_is_refused_without_a_warning() -> None:
    array = np.array([0x3F80, 0x7F81, 0x7F80], np.uint16).view(ml_dtypes.bfloat16)
    with pytest.raises(WeightError, match=r"'w': 1 of 3 values are NaN, the first at \(1,\)"):
        check_values("w", array)


def _has_sign(kind: DType) -> bool:
    return bool(np.isfinite(np.float32(-1).astype(kind.numpy)))


@pytest.mark.parametrize(
    ("kind", "sign"),
    [(kind, sign) for kind in FLOATS for sign in ((1, -1) if _has_sign(kind) else (1,))],
    ids=str,
)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
def test_one_value_that_is_not_finite_is_seen_anywhere(kind: DType, bad: float, sign: int) -> None:
    array = sign * np.arange(1, 70).reshape(3, 23).astype(kind.numpy)
    assert all_finite(array)
    assert all_finite(array[:0])
    for place in ((0, 0), (1, 7), (2, 22)):
        changed = array.copy()
        changed[place] = bad
        assert not all_finite(changed)
        assert not all_finite(changed.T)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("transform", ["identity", "interleave"])
@pytest.mark.parametrize("given", [kind for kind in FLOATS if kind.coding is None], ids=str)
def test_errors_and_notes_are_those_of_arrays(transform: str, given: DType, device: Device, tmp_path: Path) -> None:
    count = 1 if transform == "identity" else 2

    def outcome(*changes: tuple[int, int, float]) -> tuple[object, object]:
        tensors = {f"t{n}": _random((12, 5), given.name, n) for n in range(count)}
        for row, column, value in changes:
            tensors[f"t{count - 1}"][row, column] = value
        recipe = _recipe(transform, FLOAT16, tensors)
        path = _file(tmp_path / "w.safetensors", tensors)
        results: list[object] = []
        for source in (path, dict(open_safetensors(path))):
            try:
                weights = load_weights(source, program_of(recipe), device)
                results.append((weights.notes, weights["w"].reading().tobytes()))
            except WeightError as error:
                results.append(str(error))
        return results[0], results[1]

    by_parts, by_arrays = outcome((3, 2, float("nan")), (11, 4, float("nan")), (0, 0, float("inf")))
    assert by_parts == by_arrays
    assert "2 of 60 values are NaN, the first at (3, 2)" in str(by_parts)
    by_parts, by_arrays = outcome((3, 2, float("inf")), (11, 4, float("-inf")))
    assert by_parts == by_arrays
    assert "2 of 60 values are infinite" in str(by_parts)
    if given is not FLOAT16:
        by_parts, by_arrays = outcome((10, 1, 1e6))
        assert by_parts == by_arrays
        assert "compile the model with dtype='bfloat16'" in str(by_parts)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("change", ["truncated", "written over"])
def test_a_file_that_changes_between_two_parts_is_an_error(
    change: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"t": _random((64, 64), "float16")}
    path, reads, preadv = _file(tmp_path / "w.safetensors", tensors), [0], os.preadv

    def read(*args: Any) -> int:
        reads[0] += 1
        if reads[0] == 20:
            os.truncate(path, 600) if change == "truncated" else os.utime(path, ns=(1, 1))
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(WeightError, match="it was changed while it was read; load the weights again"):
        _loaded(path, _recipe("identity", FLOAT16, tensors), device)
    assert reads[0] >= 20


def test_a_system_without_positioned_reads(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    monkeypatch.setattr(MetalBuffer, "part_bytes", SMALL_PART)
    tensors = {"a": _random((33, 20), "float16"), "b": _random((33, 20), "float16", 1)}
    recipe = _recipe("concatenate", FLOAT16, tensors)
    weights = _loaded(_file(tmp_path / "w.safetensors", tensors), recipe, device)
    assert weights["w"].reading().tobytes() == b"".join(tensor.numpy().tobytes() for tensor in tensors.values())


def test_bytes_beyond_a_tensor_are_not_read(tmp_path: Path) -> None:
    file = SafetensorsFile(_file(tmp_path / "w.safetensors", {"a": torch.zeros(4), "b": torch.ones(4)}))
    for start, nbytes in ((8, 12), (-4, 4), (16, 1), (0, 17)):
        with pytest.raises(WeightError, match=r"asked for bytes .*, it has 16"):
            file.read_into("a", np.zeros(nbytes, np.uint8), start)


def test_the_host_holds_no_tensor_beside_the_device(device: Device, tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3 << 20, dtype=torch.float16), "b": torch.ones(3 << 20, dtype=torch.float16)}
    path, recipe = _file(tmp_path / "w.safetensors", tensors), _recipe("concatenate", FLOAT16, tensors)
    _loaded(path, recipe, device)  # what is imported on the way
    tracemalloc.start()
    try:
        weights = _loaded(path, recipe, device)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert weights.nbytes == 12 << 20
    assert peak < 1 << 20


def test_a_group_of_rows_larger_than_a_part_is_computed_whole(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MetalBuffer, "part_bytes", SMALL_PART)
    tensors = {"a": _random((3, 90), "float16"), "b": _random((3, 90), "float16", 1)}
    weights = _loaded(_file(tmp_path / "w.safetensors", tensors), _recipe("interleave", FLOAT16, tensors), device)
    expected = torch.stack(list(tensors.values()), 1).reshape(6, 90)
    np.testing.assert_array_equal(weights["w"].reading().view(np.float16).reshape(6, 90), expected.numpy())


def test_a_recipe_of_another_kind_than_the_file_is_refused(device: Device, tmp_path: Path) -> None:
    path = _file(tmp_path / "w.safetensors", {"t": torch.ones(4, dtype=torch.float16)})
    item = WeightInput("t", (4,), "int32")
    recipe = WeightRecipe(BufferSpec("w", FLOAT16, FLOAT16, dense((4,))), (item,))
    with pytest.raises(WeightError, match="'t': given dtype float16, expected int32"):
        _loaded(path, recipe, device)
    recipe = WeightRecipe(BufferSpec("w", dtype("int32"), dtype("int32"), dense((2, 2))), (item,))
    with pytest.raises(WeightError, match="'t': given dtype float16, expected int32"):
        _loaded(path, recipe, device)
