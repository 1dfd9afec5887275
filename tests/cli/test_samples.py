"""Sample models and photographs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image

from npu_cli import images, sample_models
from npu_cli.extras import import_extra, import_torchvision
from npu_cli.images import load_image, photograph, preprocess
from npu_cli.sample_models import photograph_crops, resnet
from npu_compiler.errors import InputError, MissingDependencyError


@pytest.mark.parametrize("size", [(64, 48), (48, 64), (300, 200)])
def test_preprocessing_crops_the_centre(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (0, 0, 0))
    side = min(size) * 2 // 3
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    image.paste((255, 0, 0), (left, top, left + side, top + side))
    array = preprocess(image, 32, 32)
    assert array.shape == (1, 3, 32, 32)
    assert array.dtype == np.float32
    red = (1 - 0.485) / 0.229
    assert array[0, 0, 16, 16] == pytest.approx(red)
    assert array[0, 0, 0, 0] == pytest.approx(-0.485 / 0.229)


def test_preprocessing_is_that_of_torchvision() -> None:
    transforms = import_torchvision().transforms
    image = load_image(photograph())
    reference = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )(image).numpy()
    difference = np.abs(preprocess(image, 224, 224)[0] - reference)
    assert difference.mean() < 0.02


def test_files_that_are_no_images(tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("text")
    for name in ("text.jpg", "missing.jpg"):
        with pytest.raises(InputError, match="give a JPEG, a PNG or"):
            load_image(tmp_path / name)


def test_missing_packages_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingDependencyError, match=r"npu-compiler\[examples\]"):
        import_extra("a_package_that_is_not_there", "examples")
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"npu-compiler\[examples\]"):
        photograph()


def test_seeded_weights_are_the_same_every_time() -> None:
    first, second = (resnet("resnet18", weights="seeded") for _ in range(2))
    for name, tensor in first.module.state_dict().items():
        assert torch.equal(tensor, second.module.state_dict()[name]), name
    assert not first.module.training
    assert first.classes is None


def test_seeded_batch_norms_are_not_trivial() -> None:
    for layer in resnet("resnet18", weights="seeded").module.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                assert tensor is not None
                assert tensor.std() > 1e-4


def test_photographs_differ() -> None:
    crops = photograph_crops(5, side=32)
    assert crops.shape == (5, 3, 32, 32)
    assert len({crop.tobytes() for crop in crops}) == 5


def test_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(models: Any, name: str) -> None:
        raise URLError("no network")

    import_torchvision()
    monkeypatch.setattr(sample_models, "_pretrained", unreachable)
    assert resnet("resnet18", weights="auto").weights.startswith("seeded")
    with pytest.raises(InputError, match="--weights seeded"):
        resnet("resnet18", weights="pretrained")
