"""Small models that index, scatter and sample, extracted as they are and compared with PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npu_compiler
import npu_runtime
from npu_compiler.errors import InputError
from npu_runtime import Device

TOLERANCE = 6e-3


@pytest.fixture(scope="module")
def device() -> Device:
    return Device("software-metal")


def check(model: nn.Module, *inputs: Tensor, device: Device) -> None:
    """Compares all outputs of a model that has to be on the device as a whole."""
    torch.manual_seed(0)
    loaded = npu_runtime.load(npu_compiler.extract(model.eval(), inputs), device=device)
    with torch.no_grad():
        expected = model(*inputs)
    found = loaded(*inputs)
    both = zip([found], [expected], strict=True) if isinstance(expected, Tensor) else zip(found, expected, strict=True)
    for own, theirs in both:
        np.testing.assert_allclose(np.asarray(own, np.float64), theirs.double().numpy(), rtol=TOLERANCE, atol=TOLERANCE)


class Experts(nn.Module):
    """A mixture of experts by gathered rows: each token goes to its expert, and is added up where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 24) / 4), nn.Parameter(torch.randn(4, 24, 16) / 5)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x).softmax(-1).max(-1)
        tokens = torch.arange(x.shape[0]).flip(0)
        chosen = experts[tokens]
        hidden = torch.bmm(x[tokens][:, None], self.up[chosen]).relu()
        made = torch.bmm(hidden, self.down[chosen])[:, 0] * weights[tokens, None]
        return torch.zeros_like(x).index_add(0, tokens, made)


class GraphLayer(nn.Module):
    """Messages along edges, added and averaged at their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, nodes: Tensor, edges: Tensor) -> tuple[Tensor, ...]:
        source, target = edges[0], edges[1]
        messages = self.linear(nodes)[source]
        at = target[:, None].expand_as(messages)
        added = torch.zeros_like(nodes).scatter_add(0, at, messages)
        mean = torch.zeros_like(nodes).scatter_reduce(0, at, messages, "mean", include_self=False)
        most = nodes.index_reduce(0, target, messages, "amax")
        degree = torch.zeros(nodes.shape[0]).index_add(0, target, torch.ones(edges.shape[1]))
        return F.relu(added + nodes), mean, most, degree


class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.localise = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 6))

    def forward(self, image: Tensor) -> Tensor:
        theta = self.localise(image).view(-1, 2, 3) * 0.3 + torch.tensor([[1.0, 0, 0], [0, 1, 0]])
        grid = F.affine_grid(theta, list(image.shape), align_corners=False)
        return F.grid_sample(image, grid, align_corners=False)


class RelativeBias(nn.Module):
    """Swin's bias of windows: a table indexed by the distance of two pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(25, 2))
        rows, columns = torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")
        places = torch.stack([rows, columns]).flatten(1)
        apart = (places[:, :, None] - places[:, None]).permute(1, 2, 0) + 2
        self.register_buffer("index", apart[..., 0] * 5 + apart[..., 1])

    def forward(self, scores: Tensor) -> Tensor:
        bias = self.table[self.get_buffer("index").view(-1)].view(9, 9, -1).permute(2, 0, 1)
        return (scores + bias[None]).softmax(-1)


class SinePositions(nn.Module):
    """Coordinates of an image's pixels, as detectors embed them."""

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        height, width = image.shape[-2:]
        ys, xs = torch.linspace(0.5, height - 0.5, height) / height, torch.linspace(0.5, width - 0.5, width) / width
        grid_y, grid_x = torch.meshgrid(ys, xs, indexing="ij")
        places = torch.stack([grid_x, grid_y], -1).view(-1, 2)
        return image.flatten(2).transpose(1, 2) + places.sum(-1, keepdim=True), places


class Mixed(nn.Module):
    """Reads and writes with None, slices and several tensors."""

    def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        y[:, i] = 1.5
        z = x.clone()
        z[i, :, i] = x[0, :, :3].T
        w = x.clone()
        w[x > 0] = 0.0
        return x[:, i], x[i, :, i], x[:, i, i[:, None]], x[i, 1:3], y, z, w, torch.index_put(x, [i], x[:3], True)


class Written(nn.Module):
    def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        wide = i[:, None].expand(3, 6)
        return (
            x.scatter(0, wide, 2.0),
            x.scatter(0, wide, x[:3] * 2),
            x.scatter(0, wide, x[:3], reduce="add"),
            x.index_fill(1, i, -1.0),
            x.clone().index_copy_(0, i, x[1:4]),
            F.one_hot(i, 5),
            torch.tril(x).flip(1).rot90(),
            F.fold(F.unfold(x[None, None], 3, padding=1), (4, 6), 3, padding=1),
        )


def _edges(nodes: int, count: int) -> Tensor:
    return torch.randint(0, nodes, (2, count), generator=torch.Generator().manual_seed(1))


_TORCH = torch.Generator().manual_seed(2)
MODELS: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "mixture of experts": (Experts(), (torch.randn(10, 16, generator=_TORCH),)),
    "graph layer": (GraphLayer(), (torch.randn(9, 12, generator=_TORCH), _edges(9, 40))),
    "spatial transformer": (SpatialTransformer(), (torch.randn(2, 3, 9, 8, generator=_TORCH),)),
    "relative bias": (RelativeBias(), (torch.randn(2, 2, 9, 9, generator=_TORCH),)),
    "positions": (SinePositions(), (torch.randn(1, 4, 3, 5, generator=_TORCH),)),
    "mixed indices": (Mixed(), (torch.randn(4, 6, 5, generator=_TORCH), torch.tensor([0, 2, 1]))),
    "writes": (Written(), (torch.randn(4, 6, generator=_TORCH), torch.tensor([3, 0, 2]))),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_as_in_pytorch(name: str, device: Device) -> None:
    model, inputs = MODELS[name]
    check(model, *inputs, device=device)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("options", [{}, {"include_last_offset": True}, {"padding_idx": 4}], ids=str)
def test_bags_of_embeddings(mode: str, options: dict[str, Any], device: Device) -> None:
    indices = torch.tensor([1, 4, 4, 0, 9, 2, 4])
    offsets = torch.tensor([0, 3, 3, 5, 7] if "include_last_offset" in options else [0, 1, 1, 3])
    check(nn.EmbeddingBag(10, 6, mode=mode, **options), indices, offsets, device=device)


def test_bags_of_equal_size_and_of_weights(device: Device) -> None:
    check(nn.EmbeddingBag(10, 6, mode="mean"), torch.tensor([[1, 2, 3], [4, 5, 9]]), device=device)
    weighted = nn.EmbeddingBag(10, 6, mode="sum")
    check(weighted, torch.tensor([1, 2, 3]), torch.tensor([0, 2]), torch.tensor([0.5, -1.0, 2.0]), device=device)


HOSTILE = (4, -5, 2**31, 2**32 + 1, -(2**63), 2**63 - 1)


class Everywhere(nn.Module):
    """All writes by one index, of a dimension of 4."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        wide = i[:, None].expand(3, 6)
        match self.kind:
            case 0:
                return x.scatter(0, wide, x[:3])
            case 1:
                return x.index_add(0, i, x[:3])
            case 2:
                return torch.index_put(x, [i, i], x[0, :3])
            case 3:
                return x.scatter_reduce(0, torch.stack([i] * 6, 1), x[:3], "amax")
            case 4:
                return x.index_fill(0, i, 3.0)
            case 5:
                return torch.index_put(x, [i], x[:3], True)
        return F.one_hot(i, 4) + x[i, :4]


@pytest.mark.parametrize("kind", range(7))
def test_no_index_writes_or_reads_beyond_its_tensor(kind: int, device: Device) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    model = npu_runtime.load(npu_compiler.extract(Everywhere(kind).eval(), (x, torch.tensor([0, 2, 1]))), device=device)
    for value in HOSTILE:
        with pytest.raises(InputError, match=f"given the index {value} at position"):
            model(x, torch.tensor([1, value, 0]))
    expected = Everywhere(kind)(x, torch.tensor([3, 1, 0]))
    np.testing.assert_allclose(model(x, torch.tensor([3, 1, 0])), expected.numpy(), atol=TOLERANCE)
