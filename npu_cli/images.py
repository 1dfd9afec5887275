"""Photographs, as an ImageNet classifier takes them."""

from __future__ import annotations

import warnings
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
_MOST_PIXELS = 1 << 27  # 384 MiB once decoded; a file of a few bytes may claim any number
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
    """Reads an image file as a Pillow image in RGB, turned as its EXIF data says.

    Raises:
        InputError: The file is missing, not an image, or of more pixels than any photograph.
        MissingDependencyError: Pillow is not installed.
    """
    pillow, operations = import_extra("PIL.Image", "examples"), import_extra("PIL.ImageOps", "examples")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pillow.DecompressionBombWarning)  # the limit is this project's own
            opened = pillow.open(path)
        with opened as image:
            if image.width * image.height > _MOST_PIXELS:
                raise _too_large(path, f"{image.width} x {image.height}")
            return operations.exif_transpose(image).convert("RGB")
    except pillow.DecompressionBombError as error:
        raise _too_large(path, str(error)) from error
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for damaged files
        raise InputError(f"cannot read '{path}' as an image ({error}); give a JPEG, a PNG or an .npy file") from error


def _too_large(path: Path, size: str) -> InputError:
    return InputError(f"'{path}' is too large ({size}), expected at most {_MOST_PIXELS} pixels; scale it down first")


def preprocess(image: Any, height: int, width: int) -> NDArray[np.float32]:
    """Scales an image so that it covers the crop with ImageNet's margin (256 for 224), crops its centre, normalises it.

    Only what the crop shows is scaled, so that a long and narrow image takes no more memory than another.

    Args:
        image: A Pillow image in RGB.
        height, width: Size of the crop in pixels.

    Returns:
        Shape [1, 3, height, width], with ImageNet's mean and standard deviation taken out.
    """
    scale = max(height / image.height, width / image.width) * _SCALE
    size = (int(image.width * scale + _ROUNDING), int(image.height * scale + _ROUNDING))
    left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
    across, down = image.width / size[0], image.height / size[1]  # pixels of the image for each that is scaled
    box = (left * across, top * down, (left + width) * across, (top + height) * down)
    scaled = image.resize((width, height), resample=_bilinear(), box=box)
    pixels = np.asarray(scaled, np.float32) / 255
    normalised = ((pixels - _MEAN) / _STD).astype(np.float32, copy=False)
    return np.ascontiguousarray(normalised.transpose(2, 0, 1))[np.newaxis]


def _bilinear() -> Any:
    return import_extra("PIL.Image", "examples").Resampling.BILINEAR
