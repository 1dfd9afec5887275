"""Photographs, as an ImageNet classifier takes them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_cli.extras import import_extra
from npu_compiler.errors import InputError, MissingDependencyError

__all__ = ["PHOTOGRAPHS", "load_image", "photograph", "preprocess"]

# Files of scikit-image that are photographs, in colour.
PHOTOGRAPHS = ("chelsea.png", "coffee.png", "astronaut.png", "rocket.jpg", "motorcycle_left.png")

_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_STD = np.array([0.229, 0.224, 0.225], np.float32)
_SCALE = 256 / 224  # the shorter side before cropping, over the side of the crop
_ROUNDING = 1e-6  # keeps the shorter side whole; the longer is rounded down, as torchvision does


def photograph(name: str = PHOTOGRAPHS[0]) -> Path:
    """Path of a photograph that scikit-image ships.

    Raises:
        MissingDependencyError: scikit-image is not installed.
    """
    spec = find_spec("skimage")  # found, not imported: importing it takes a second
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            "the sample photographs come with scikit-image, which is not installed; install the extra that has it: "
            "pip install 'npu-compiler[examples]'"
        )
    return Path(spec.origin).parent / "data" / name


def load_image(path: Path) -> Any:
    """Reads an image file as a Pillow image in RGB.

    Raises:
        InputError: The file is missing or not an image.
        MissingDependencyError: Pillow is not installed.
    """
    pillow = import_extra("PIL.Image", "examples")
    try:
        return pillow.open(path).convert("RGB")
    except OSError as error:
        raise InputError(f"cannot read '{path}' as an image ({error}); give a JPEG, a PNG or an .npy file") from error


def preprocess(image: Any, height: int, width: int) -> NDArray[np.float32]:
    """Scales an image so that it covers the crop with ImageNet's margin (256 for 224), crops its centre, normalises it.

    Args:
        image: A Pillow image in RGB.
        height, width: Size of the crop in pixels.

    Returns:
        Shape [1, 3, height, width], with ImageNet's mean and standard deviation taken out.
    """
    scale = max(height / image.height, width / image.width) * _SCALE
    size = (int(image.width * scale + _ROUNDING), int(image.height * scale + _ROUNDING))
    scaled = image.resize(size, resample=_bilinear())
    left, top = round((scaled.width - width) / 2), round((scaled.height - height) / 2)
    pixels = np.asarray(scaled.crop((left, top, left + width, top + height)), np.float32) / 255
    normalised = ((pixels - _MEAN) / _STD).astype(np.float32, copy=False)
    return np.ascontiguousarray(normalised.transpose(2, 0, 1))[np.newaxis]


def _bilinear() -> Any:
    return import_extra("PIL.Image", "examples").Resampling.BILINEAR
