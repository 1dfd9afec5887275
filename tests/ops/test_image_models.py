"""Networks of lines, images and volumes, small but whole: nothing is left to the CPU, and numbers are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npu_compiler
from npu_runtime import Device, Executor, NPUBuffer, load_weights


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Down, up by transposed convolutions of both kinds, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(3, 8), _block(8, 16), _block(16, 24)])
        self.raised = nn.ModuleList([nn.ConvTranspose2d(24, 16, 2, 2), nn.ConvTranspose2d(16, 8, 4, 2, 1)])
        self.joined = nn.ModuleList([_block(32, 16), _block(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](F.max_pool2d(first, 2))
        x = self.down[2](F.max_pool2d(second, 2))
        x = self.joined[0](torch.cat([self.raised[0](x), second], 1))
        result: Tensor = self.head(self.joined[1](torch.cat([self.raised[1](x), first], 1)))
        return result


class Pyramid(nn.Module):
    """A head of a segmentation network: dilated convolutions, pooled context, and resizing by both methods."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.branches = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=rate, dilation=rate) for rate in (1, 2)])
        self.context, self.head = nn.Conv2d(16, 8, 1), nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.stem(x))
        context = F.interpolate(self.context(F.adaptive_avg_pool2d(y, 1)), y.shape[-2:], mode="bilinear")
        y = self.head(torch.cat([*(F.relu(branch(y)) for branch in self.branches), context], 1))
        y = F.interpolate(y, scale_factor=1.5, mode="nearest")
        return F.interpolate(y, x.shape[-2:], mode="bicubic", align_corners=True)


class Speech(nn.Module):
    """Samples to frames, as wav2vec2 has it, with a depthwise convolution and a normed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.samples, self.frames = nn.Conv1d(1, 16, 10, 5, bias=False), nn.Conv1d(16, 16, 3, 2)
        self.norm, self.near = nn.GroupNorm(16, 16), nn.Conv1d(16, 16, 5, padding=2, groups=16)
        self.place = nn.utils.parametrizations.weight_norm(nn.Conv1d(16, 16, 4, padding=2, groups=2), dim=2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.frames(F.gelu(self.norm(self.samples(x)))))
        y = y + self.near(y)
        return F.layer_norm((y + self.place(y)[..., :-1]).transpose(1, 2), (16,))


class Video(nn.Module):
    """Volumes: all taps, those of planes, those along the depth, pools and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(3, 8, 3, (1, 2, 2), 1, bias=False), nn.BatchNorm3d(8), nn.ReLU())
        self.planes, self.depth = nn.Conv3d(8, 12, (1, 3, 3), padding=(0, 1, 1)), nn.Conv3d(12, 8, (3, 1, 1))
        self.raised = nn.ConvTranspose3d(8, 8, 2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.depth(self.planes(self.stem(x)))
        return self.raised(F.max_pool3d(y, (2, 2, 2))), F.adaptive_avg_pool3d(y, (1, 2, 2))


class Style(nn.Module):
    """Reflected borders, instance norms, and a generator's transposed convolutions with BatchNorms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.ReflectionPad2d(2), nn.Conv2d(3, 8, 5), nn.InstanceNorm2d(8, affine=True), nn.ReLU()
        )
        self.last = nn.Sequential(
            nn.Conv2d(8, 12, 3, 2, 1, padding_mode="circular"), nn.GroupNorm(3, 12), nn.SiLU(),
            nn.ConvTranspose2d(12, 8, 4, 2, 1, groups=2, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(8, 3, 3, 1, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x))
        return result


class Pooled(nn.Module):
    """What a pooling took is put back where it was, and normed linears tell what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.LocalResponseNorm(3)
        self.linear, self.batch = nn.Linear(8, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = F.max_pool2d(F.relu(self.filters(x)), 2, return_indices=True)
        again = F.max_unpool2d(self.norm(values), places, (2, 2))
        return again, self.batch(self.linear(F.lp_pool2d(values, 2, 4).mean((2, 3))))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet": (UNet, (1, 3, 16, 16)),
    "pyramid": (Pyramid, (2, 3, 20, 24)),
    "speech": (Speech, (1, 1, 200)),
    "video": (Video, (1, 3, 6, 12, 12)),
    "style": (Style, (2, 3, 12, 12)),
    "pooled": (Pooled, (2, 3, 8, 8)),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def _network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    network = make().eval()
    for module in network.modules():  # else a BatchNorm would change nothing
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            for name_, value in module.state_dict().items():
                if value.is_floating_point():
                    value.uniform_(*((0.5, 1.5) if name_ in ("weight", "running_var") else (-0.5, 0.5)))
    return network, torch.randn(shape)


@every_network
@pytest.mark.parametrize("target", ["metal", "cuda"])
def test_nothing_is_left_to_the_cpu(name: str, target: str) -> None:
    network, x = _network(name)
    ir = npu_compiler.extract(network, x, model_name=name).ir
    refused = {node["name"]: npu_compiler.is_op_supported(node, target).reason for node in ir["nodes"]}
    assert {node: reason for node, reason in refused.items() if reason} == {}
    assert npu_compiler.compile(ir, target=target).main.steps


@every_network
def test_gives_what_pytorch_gives(name: str, device: Device) -> None:
    network, x = _network(name)
    extracted = npu_compiler.extract(network, x, model_name=name)
    program = npu_compiler.compile(extracted.ir, target=device.target)
    weights = load_weights({key: value.numpy() for key, value in network.state_dict().items()}, program, device)
    (spec,) = program.input_specs
    outputs = Executor(program, device).run({spec.name: NPUBuffer.from_numpy(x.numpy(), device, spec=spec)}, weights)
    with torch.inference_mode():
        expected = network.double()(x.double())
    for spec, wanted in zip(
        program.output_specs, expected if isinstance(expected, tuple) else (expected,), strict=True
    ):
        found, reference = outputs[spec.name].to_numpy(spec=spec).astype(np.float64), wanted.numpy()
        assert np.abs(found - reference).max() < 0.02 * np.abs(reference).max()


@every_network
def test_batch_norms_are_folded(name: str) -> None:
    network, x = _network(name)
    program = npu_compiler.compile(npu_compiler.extract(network, x, model_name=name).ir)
    assert "running_var" not in {spec.spec.name.rpartition(".")[2] for spec in program.recipes}
