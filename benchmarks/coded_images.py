"""Networks of convolutions in codes of eight bits, in the spelling that PyTorch's PT2E leaves in a graph.

Weights have a scale for each output, what goes between has one scale and one zero point; ranges are those that some
images reach.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the ops
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

__all__ = ["with_codes"]

_OPS: Any = torch.ops.quantized_decomposed
_LIMITS = (-128, 127, torch.int8)
_WEIGHTS = (-127, 127, torch.int8)
_LEARNED = (nn.Conv2d, nn.Linear)


class Rounded(nn.Module):
    """Numbers that went through codes."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        low, high = min(low, 0.0), max(high, 0.0)
        self.scale = (high - low) / 255 or 1.0
        self.zero = max(-128, min(127, round(-128 - low / self.scale)))

    def forward(self, x: Tensor) -> Tensor:
        codes = _OPS.quantize_per_tensor(x, self.scale, self.zero, *_LIMITS)
        numbers: Tensor = _OPS.dequantize_per_tensor(codes, self.scale, self.zero, *_LIMITS)
        return numbers


class Coded(nn.Module):
    """A convolution or a linear whose weight is codes.

    Attributes:
        codes, scales, zeros: A scale and a zero point for each output.
        geometry: Steps, padding, dilation and groups of a convolution.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, module: Any) -> None:
        super().__init__()
        weight = module.weight.detach()
        scales = weight.abs().flatten(1).amax(1).clamp_min(1e-12) / 127
        codes = (weight / scales.reshape(-1, *(1,) * (weight.ndim - 1))).round().to(torch.int8)
        for name, value in (
            ("codes", codes),
            ("scales", scales),
            ("zeros", torch.zeros(len(scales), dtype=torch.int64)),
        ):
            self.register_buffer(name, value)
        self.bias = module.bias
        convolves = isinstance(module, nn.Conv2d)
        self.geometry = (module.stride, module.padding, module.dilation, module.groups) if convolves else None

    def forward(self, x: Tensor) -> Tensor:
        weight = _OPS.dequantize_per_channel(self.codes, self.scales, self.zeros, 0, *_WEIGHTS)
        if self.geometry is None:
            return nn.functional.linear(x, weight, self.bias)
        return nn.functional.conv2d(x, weight, self.bias, *self.geometry)


class _Ranges(fx.Interpreter):
    """Runs a graph and keeps the least and the greatest number of each of its tensors."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[fx.Node, tuple[float, float]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.found[n] = float(result.min()), float(result.max())
        return result


def _without_norms(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with its BatchNorms in the weights of the convolutions ahead of them."""
    parts = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        norm = parts.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(norm, nn.BatchNorm2d):
            (source,) = node.all_input_nodes
            convolution: Any = parts[str(source.target)]
            graph.add_submodule(str(source.target), fuse_conv_bn_eval(convolution, norm))
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def with_codes(module: nn.Module, images: Tensor) -> nn.Module:
    """A network of convolutions, BatchNorms and sums with codes of eight bits for all that goes into these.

    Args:
        module: In eval mode, float32; traceable by `torch.fx`.
        images: [N, C, H, W], from which ranges are taken.
    """
    graph = _without_norms(fx.symbolic_trace(module.eval()))
    ranges = _Ranges(graph)
    with torch.no_grad():
        ranges.run(images)
    parts = dict(graph.named_modules())
    coded: dict[fx.Node, fx.Node] = {}
    for node in list(graph.graph.nodes):
        learned = node.op == "call_module" and isinstance(parts[node.target], _LEARNED)
        if not learned and getattr(node.target, "__name__", "") not in ("add", "iadd"):
            continue
        for source in node.all_input_nodes:
            if source not in coded:
                name = f"rounded_{len(coded)}"
                graph.add_submodule(name, Rounded(*ranges.found[source]))
                with graph.graph.inserting_after(source):
                    coded[source] = graph.graph.call_module(name, (source,))
            node.replace_input_with(source, coded[source])
        if learned:
            graph.add_submodule(str(node.target), Coded(parts[node.target]))
    graph.recompile()
    return graph.eval()
