"""Sample models and photographs."""

from __future__ import annotations

import struct
import zlib
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


def test_images_are_turned_as_their_exif_data_says(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20))
    image.paste((255, 0, 0), (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn by 90 degrees to the right
    image.save(tmp_path / "turned.png", exif=exif)
    turned = load_image(tmp_path / "turned.png")
    assert turned.size == (20, 40)
    assert turned.getpixel((10, 5)) == (255, 0, 0)
    assert turned.getpixel((10, 35)) == (0, 0, 0)


def test_pixels_are_counted_before_they_are_decoded(tmp_path: Path) -> None:
    for side in (12_000, 100_000):  # beyond the project's own limit, and beyond Pillow's
        path = tmp_path / f"{side}.png"
        Image.new("1", (8, 8)).save(path)
        data = bytearray(path.read_bytes())
        data[16:24] = struct.pack(">II", side, side)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
        path.write_bytes(data)
        with pytest.raises(InputError, match="is too large"):
            load_image(path)


def test_of_a_long_and_narrow_image_only_the_crop_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    plain = Image.Image.resize

    def resize(image: Image.Image, size: tuple[int, int], **options: Any) -> Image.Image:
        sizes.append(size)
        return plain(image, size, **options)

    monkeypatch.setattr(Image.Image, "resize", resize)
    assert preprocess(Image.new("RGB", (20_000, 1)), 224, 224).shape == (1, 3, 224, 224)
    assert sizes == [(224, 224)]


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
