"""Finds the face in a photograph with the weights of MTCNN. ``python examples/find_faces.py``.

Needs the weights in ``facenet-pytorch``, which examples/weights.txt lists. Three networks (Zhang and others, 2016): one
proposes squares in a pyramid of the image, two refine what is left of them. All else is numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import npu_compiler
import npu_runtime
from npu_cli.extras import package_folder
from npu_cli.images import load_image, photograph

_SIDE = 256
_SMALLEST_FACE, _SHRINK, _CELL, _STRIDE = 48, 0.709, 12, 2
_BATCH = 32  # squares that a refining network takes at once
_LEAST = {"pnet": 0.7, "rnet": 0.8, "onet": 0.9}  # scores

Array = NDArray[np.float32]
Network = Callable[..., Sequence[Array]]


class Layers(torch.nn.Module):
    """One of the networks: convolutions with PReLU and pooling between them, a linear layer where there is one, heads.

    Args:
        state: Its weights.
        pools: Kernel size of the pooling after each convolution, 0 for none.
        heads: Names of the layers for the score, and for the shift of the corners.
    """

    def __init__(self, state: dict[str, torch.Tensor], pools: Sequence[int], heads: Sequence[str]) -> None:
        super().__init__()
        self.pools, self.heads = pools, heads
        for name in dict.fromkeys(key.rpartition(".")[0] for key in state):
            weight = state[f"{name}.weight"]
            kind: torch.nn.Module
            if name.startswith("prelu"):
                kind = torch.nn.PReLU(len(weight))
            elif weight.ndim == 4:
                kind = torch.nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2])
            else:
                kind = torch.nn.Linear(weight.shape[1], weight.shape[0])
            self.add_module(name, kind)
        self.load_state_dict(state)

    def forward(self, *images: torch.Tensor) -> list[torch.Tensor]:
        """For each image, or batch of squares: how likely a face is, and where its corners are."""
        return [tensor for image in images for tensor in self._one(image)]

    def _one(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layers = dict(self.named_children())
        for number, pool in enumerate(self.pools, 1):
            x = layers[f"prelu{number}"](layers[f"conv{number}"](x))
            if pool:
                x = torch.nn.functional.max_pool2d(x, pool, 2, ceil_mode=True)
        dense = f"dense{len(self.pools) + 1}"
        if dense in layers:
            x = layers[dense](x.permute(0, 3, 2, 1).flatten(1))
            x = layers[f"prelu{len(self.pools) + 1}"](x)
        score, corners = (layers[name](x) for name in self.heads)
        return torch.softmax(score, dim=1)[:, 1], corners


def networks(folder: Path) -> dict[str, Layers]:
    kinds = {
        "pnet": ((2, 0, 0), ("conv4_1", "conv4_2")),
        "rnet": ((3, 3, 0), ("dense5_1", "dense5_2")),
        "onet": ((3, 3, 2, 0), ("dense6_1", "dense6_2")),
    }
    states = {name: torch.load(folder / "data" / f"{name}.pt", weights_only=True) for name in kinds}
    return {name: Layers(states[name], *kind).eval() for name, kind in kinds.items()}


def resized(image: Image.Image, width: int, height: int) -> Array:
    """Shape [1, 3, height, width], from -1 to 1."""
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BOX), np.float32)
    return np.asarray((pixels.transpose(2, 0, 1)[None] - 127.5) / 128, np.float32)


def scales() -> list[float]:
    count = int(np.log(_SMALLEST_FACE / _SIDE) / np.log(_SHRINK)) + 1
    return [_CELL / _SMALLEST_FACE * _SHRINK**number for number in range(count)]


def pyramid(image: Image.Image) -> list[Array]:
    return [resized(image, int(_SIDE * scale + 1), int(_SIDE * scale + 1)) for scale in scales()]


def proposed(maps: Sequence[Array]) -> Array:
    """Squares of the first network: left, top, right, bottom, score."""
    found = []
    for scale, score, corners in zip(scales(), maps[::2], maps[1::2], strict=True):
        rows, columns = np.nonzero(score[0] >= _LEAST["pnet"])
        left, top = _STRIDE * columns / scale, _STRIDE * rows / scale
        side = _CELL / scale
        boxes = np.stack([left, top, left + side, top + side, score[0, rows, columns]], 1)
        found.append(kept(shifted(boxes, corners[0, :, rows, columns]), 0.5))
    return kept(np.concatenate(found), 0.7)


def refined(network: Network, name: str, side: int, image: Image.Image, boxes: Array) -> Array:
    """What another network makes of squares, all of which it sees at `side` pixels."""
    squares = squared(boxes)
    crops = [resized(image.crop(tuple(box[:4])), side, side) for box in squares.round().astype(int)]
    if not crops:
        return boxes
    batches = []
    for start in range(0, len(crops), _BATCH):
        batch = np.concatenate(crops[start : start + _BATCH])
        padded = np.concatenate([batch, np.zeros((_BATCH - len(batch), 3, side, side), np.float32)])
        batches.append([result[: len(batch)] for result in network(padded)])
    score, corners = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    good = score > _LEAST[name]
    squares[:, 4] = score
    return kept(shifted(squares[good], corners[good]), 0.7)


def shifted(boxes: Array, corners: Array) -> Array:
    """Boxes whose corners move by parts of their width and height."""
    extents = np.stack([boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]] * 2, 1)
    return np.concatenate([boxes[:, :4] + corners * extents, boxes[:, 4:]], 1)


def squared(boxes: Array) -> Array:
    """The squares around the same centres that hold the boxes."""
    half = np.maximum(boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1])[:, None] / 2
    centre = (boxes[:, :2] + boxes[:, 2:4]) / 2
    return np.concatenate([centre - half, centre + half, boxes[:, 4:]], 1)


def kept(boxes: Array, most: float) -> Array:
    """The likeliest boxes of those that share more than a part `most` of their area."""
    found: list[Array] = []
    for box in boxes[np.argsort(-boxes[:, 4], kind="stable")]:
        if all(_shared(box, other) <= most for other in found):
            found.append(box)
    return np.array(found, np.float32).reshape(-1, 5)


def _shared(one: Array, other: Array) -> float:
    low, high = np.maximum(one[:2], other[:2]), np.minimum(one[2:4], other[2:4])
    common = float(np.prod(np.clip(high - low, 0, None)))
    areas = (float(np.prod(box[2:4] - box[:2])) for box in (one, other))
    return common / (sum(areas) - common)


def faces(image: Image.Image, nets: Mapping[str, Network]) -> Array:
    boxes = proposed(nets["pnet"](*pyramid(image)))
    boxes = refined(nets["rnet"], "rnet", 24, image, boxes)
    return refined(nets["onet"], "onet", 48, image, boxes)


def in_pytorch(module: torch.nn.Module) -> Network:
    def call(*arrays: Array) -> list[Array]:
        with torch.no_grad():
            return [tensor.numpy() for tensor in module(*map(torch.from_numpy, arrays))]

    return call


def main() -> None:
    image = load_image(photograph("astronaut.png")).resize((_SIDE, _SIDE))
    modules = networks(package_folder("facenet_pytorch", "facenet-pytorch"))
    examples = {
        "pnet": tuple(map(torch.from_numpy, pyramid(image))),
        "rnet": (torch.zeros(_BATCH, 3, 24, 24),),
        "onet": (torch.zeros(_BATCH, 3, 48, 48),),
    }
    on_device = {name: npu_runtime.load(npu_compiler.extract(modules[name], examples[name])) for name in modules}
    found = faces(image, on_device)
    wanted = faces(image, {name: in_pytorch(module) for name, module in modules.items()})
    for title, boxes in (("found", found), ("PyTorch", wanted)):
        for left, top, right, bottom, score in boxes:
            print(f"{title:>8}: a face from ({left:.0f}, {top:.0f}) to ({right:.0f}, {bottom:.0f}), score {score:.4f}")


if __name__ == "__main__":
    main()
