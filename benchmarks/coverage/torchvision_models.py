"""All classifiers, segmentation models and detection backbones of torchvision, and its video models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.coverage.entry import Built, Entry
from npu_cli.extras import import_torchvision

__all__ = ["entries"]

_SIDE = 64
# Models whose shapes fix the image, or that divide it too often for a smaller one.
_SIDES = {"inception_v3": 96, "maxvit_t": 224, "vit_h_14": 70}
_SIDES |= {"ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 128}
_FRAMES, _FRAME_SIDE = 8, 32
_FRAME_SIDES = {"mvit_v1_b": 224, "mvit_v2_s": 224, "s3d": 224, "swin3d_t": 64, "swin3d_s": 64, "swin3d_b": 64}


def entries() -> Iterator[Entry]:
    """Every registered model but the quantised ones, which are not float32, and optical flow."""
    models = import_torchvision().models
    for name in models.list_models(module=models):
        yield Entry(f"torchvision/{name}", "classification", partial(_classifier, name), classes=True)
    for name in models.list_models(module=models.segmentation):
        yield Entry(f"torchvision/{name}", "segmentation", partial(_segmentation, name))
    for name in models.list_models(module=models.detection):
        yield Entry(f"torchvision/{name}", "detection", partial(_detection, name))
    for name in models.list_models(module=models.video):
        yield Entry(f"torchvision/{name}", "video", partial(_video, name), classes=True)


def _image(name: str) -> torch.Tensor:
    side = _SIDES.get(name, _SIDE)
    return torch.randn(1, 3, side, side)


def _classifier(name: str) -> Built:
    image = _image(name)
    options: dict[str, Any] = {"image_size": image.shape[-1]} if name.startswith("vit_") else {}
    if name in ("googlenet", "inception_v3"):
        options |= {"init_weights": False, "aux_logits": False}
    return Built(import_torchvision().models.get_model(name, weights=None, **options), (image,))


def _segmentation(name: str) -> Built:
    return Built(import_torchvision().models.get_model(name, weights=None, weights_backbone=None), (_image(name),))


class _DetectorHead(torch.nn.Module):
    """A detector without what depends on values: backbone, and the head that scores every anchor."""

    def __init__(self, backbone: torch.nn.Module, head: torch.nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, image: torch.Tensor) -> Any:
        found = self.backbone(image)
        features = list(found.values()) if isinstance(found, dict) else [found]
        return features, self.head(features)


def _detection(name: str) -> Built:
    model = import_torchvision().models.get_model(name, weights=None, weights_backbone=None)
    head = model.rpn.head if hasattr(model, "rpn") else model.head
    return Built(_DetectorHead(model.backbone, head), (_image(name),))


def _video(name: str) -> Built:
    side = _FRAME_SIDES.get(name, _FRAME_SIDE)
    frames = 16 if name.startswith(("mvit", "s3d")) else _FRAMES
    return Built(import_torchvision().models.get_model(name, weights=None), (torch.randn(1, 3, frames, side, side),))
