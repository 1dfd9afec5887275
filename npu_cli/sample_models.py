"""ResNets with weights worth compiling: pretrained where they can be had, else seeded and calibrated on photographs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_cli.extras import import_torchvision
from npu_cli.images import PHOTOGRAPHS, load_image, photograph, preprocess
from npu_compiler.errors import InputError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["SampleModel", "photograph_crops", "resnet"]

_DOWNLOAD_TIMEOUT = 5.0  # seconds without an answer


@dataclass(frozen=True)
class SampleModel:
    """A model ready to extract.

    Attributes:
        module: In eval mode, float32.
        weights: Where its weights come from, in words.
        classes: Names of its classes; None where the weights know none.
    """

    module: torch.nn.Module
    weights: str
    classes: tuple[str, ...] | None


def resnet(name: str = "resnet18", weights: str = "auto") -> SampleModel:
    """A ResNet of torchvision for 1000 classes.

    Args:
        name: ``resnet18``, ``resnet50`` or another of torchvision's.
        weights: ``pretrained`` (from torchvision, over the network or its cache), ``seeded`` (the same on every machine
            with the same torch), or ``auto``: pretrained where that works.

    Raises:
        InputError: Pretrained weights were asked for and cannot be had.
        MissingDependencyError: torchvision, Pillow or scikit-image is not installed.
    """
    models = import_torchvision().models
    if weights != "seeded":
        try:
            return _pretrained(models, name)
        except OSError as error:
            if weights == "pretrained":
                raise InputError(
                    f"the pretrained weights of {name} cannot be fetched ({error}); connect to the network, or take "
                    "seeded ones: --weights seeded"
                ) from error
    return SampleModel(_seeded(models, name), "seeded, BatchNorm statistics from photographs", None)


def _pretrained(models: Any, name: str) -> SampleModel:
    choice = models.get_model_weights(name).DEFAULT
    # torch.hub announces a download on stdout, even one that fails.
    with _network_timeout(_DOWNLOAD_TIMEOUT), redirect_stdout(StringIO()):
        state = choice.get_state_dict(progress=False, check_hash=True)
    module = models.get_model(name, weights=None).eval()
    module.load_state_dict(state)
    return SampleModel(module, f"pretrained, {choice}", tuple(choice.meta["categories"]))


@contextmanager
def _network_timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _seeded(models: Any, name: str) -> torch.nn.Module:
    """Weights from a fixed seed that behave like trained ones where it matters to a compiler.

    BatchNorms have random scale and shift, and statistics from forward passes over photographs, so that none could be
    folded wrongly without being seen. Residual branches are weaker than what they are added to. The classifier is
    centred, so that each photograph has classes of its own, and its rows differ in length, so that the best lie apart.
    """
    import torch

    photographs = torch.from_numpy(photograph_crops(8))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module: torch.nn.Module = models.get_model(name, weights=None)
        _randomise_batch_norms(module)
        module.train()
        for start in range(0, len(photographs), 4):
            module(photographs[start : start + 4])
        _spread_classes(module.eval(), photographs)
    return module


def _randomise_batch_norms(module: torch.nn.Module) -> None:
    import torch

    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.weight.uniform_(0.5, 1.5)
            layer.bias.normal_(0, 0.2)
            layer.momentum = None  # statistics are the plain mean over all passes
    for layer in module.modules():
        last = getattr(layer, "bn3", getattr(layer, "bn2", None))  # of a residual block
        if isinstance(last, torch.nn.BatchNorm2d):
            last.weight.mul_(0.2)


def _spread_classes(module: torch.nn.Module, photographs: torch.Tensor) -> None:
    """Gives the classifier rows of different length, and a bias that takes out the mean over `photographs`."""
    import torch

    classifier = module.get_submodule("fc")
    assert isinstance(classifier, torch.nn.Linear)
    classifier.weight.mul_(torch.randn(classifier.out_features, 1).mul(1.5).exp())
    features: list[torch.Tensor] = []
    hook = classifier.register_forward_pre_hook(lambda _, args: features.append(args[0]))
    module(photographs)
    hook.remove()
    classifier.bias.copy_(-(classifier.weight @ features[0].mean(0)))


def photograph_crops(count: int, side: int = 224, seed: int = 0) -> NDArray[np.float32]:
    """Random square crops of photographs.

    Returns:
        Shape [count, 3, side, side], normalised as ImageNet's classifiers expect.
    """
    rng = np.random.default_rng(seed)
    crops = []
    for index in range(count):
        image = load_image(photograph(PHOTOGRAPHS[index % len(PHOTOGRAPHS)]))
        size = int(rng.uniform(0.5, 0.9) * min(image.size))
        left, top = (int(rng.integers(0, extent - size + 1)) for extent in image.size)
        crops.append(preprocess(image.crop((left, top, left + size, top + size)), side, side))
    return np.concatenate(crops)
