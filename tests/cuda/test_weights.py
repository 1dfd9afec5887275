"""Weights from a file to a GPU, through pinned memory: larger than its pieces, merged, converted, refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from npu_compiler.artifact.recipes import WeightInput, WeightRecipe
from npu_compiler.dtypes import BFLOAT16, FLOAT16, DType
from npu_compiler.errors import WeightError
from npu_compiler.tensor.layout import BufferSpec, dense
from npu_runtime import Device, Weights, load_weights
from tests.runtime.plans import axpy_program

ROWS, WIDTH = 3001, 1536  # in float16 more than a piece of pinned memory holds


def _load(path: Path, device: Device, kind: DType, given: str, transforms: dict[str, list[str]]) -> Weights:
    recipes = tuple(
        WeightRecipe(
            BufferSpec(transform, kind, kind, dense((len(names) * ROWS, WIDTH))),
            tuple(WeightInput(name, (ROWS, WIDTH), given) for name in names),
            transform,
        )
        for transform, names in transforms.items()
    )
    return load_weights(path, replace(axpy_program(), target="cuda", recipes=recipes), device)


@pytest.mark.parametrize(("kind", "given"), [(BFLOAT16, "bfloat16"), (FLOAT16, "float16"), (FLOAT16, "float32")])
def test_a_file_is_on_the_device_as_its_recipes_say(kind: DType, given: str, device: Device, tmp_path: Path) -> None:
    generator, path = torch.Generator().manual_seed(0), tmp_path / "w.safetensors"
    tensors = {name: torch.randn((ROWS, WIDTH), generator=generator).to(getattr(torch, given)) for name in "abc"}
    save_file(tensors, path)
    transforms = {"identity": ["a"], "concatenate": ["c", "a"], "interleave": ["b", "c"]}
    weights = _load(path, device, kind, given, transforms)
    a, b, c = (tensor.to(getattr(torch, kind.name)) for tensor in tensors.values())
    for name, expected in {
        "identity": a,
        "concatenate": torch.cat((c, a)),
        "interleave": torch.stack((b, c), 1),
    }.items():
        np.testing.assert_array_equal(
            weights[name].reading().view(np.int16), expected.view(torch.int16).numpy().ravel()
        )
    assert weights.notes == ()


def test_values_that_are_no_numbers_are_told(device: Device, tmp_path: Path) -> None:
    path, tensor = tmp_path / "w.safetensors", torch.ones((ROWS, WIDTH), dtype=torch.bfloat16)
    tensor[ROWS - 1, WIDTH - 1] = float("-inf")
    save_file({"a": tensor}, path)
    weights = _load(path, device, BFLOAT16, "bfloat16", {"identity": ["a"]})
    assert weights.notes == (f"'a': 1 of {ROWS * WIDTH} values are infinite",)
    np.testing.assert_array_equal(
        weights["identity"].reading().view(np.int16), tensor.view(torch.int16).numpy().ravel()
    )
    tensor[ROWS - 1, 0] = float("nan")
    save_file({"a": tensor}, path)
    with pytest.raises(WeightError, match=rf"1 of {ROWS * WIDTH} values are NaN, the first at \({ROWS - 1}, 0\)"):
        _load(path, device, BFLOAT16, "bfloat16", {"identity": ["a"]})
    path.write_bytes(path.read_bytes()[: -(1 << 20)])
    with pytest.raises(WeightError, match="no whole safetensors file"):
        _load(path, device, BFLOAT16, "bfloat16", {"identity": ["a"]})


def test_what_is_written_by_parts_stays_between_them(device: Device) -> None:
    buffer = device.backend.allocate(1 << 20)
    with buffer.writing() as memory:
        memory[:] = 1
    with buffer.writing_part(4096, 5) as memory:
        memory[:] = 2
    content = buffer.reading()
    assert np.flatnonzero(content == 2).tolist() == list(range(4096, 4101))
    assert int((content == 1).sum()) == (1 << 20) - 5
