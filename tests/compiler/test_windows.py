"""Transformers of shifted windows: attention is one kernel, however masks are added, and numbers are PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
import npu_runtime
from npu_cli.extras import import_torchvision
from npu_compiler.frontend.ir_reader import read_graph
from npu_compiler.graph.graph_optimizer import optimize
from tests.support.decoders import import_transformers

BATCH, BLOCKS = 3, 4
TOLERANCE = 1e-2  # beside the largest result
_HUGGING_FACE = {
    "image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 2,
}  # fmt: skip


def _torchvision(version: int) -> nn.Module:
    import_torchvision()
    from torchvision.models import swin_transformer as swin

    blocks: dict[str, Any] = {"block": swin.SwinTransformerBlock, "downsample_layer": swin.PatchMerging}
    if version == 2:
        blocks = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    sizes: dict[str, Any] = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    made = swin.SwinTransformer([2, 2], num_classes=9, norm_layer=partial(nn.LayerNorm, eps=1e-5), **sizes, **blocks)
    assert isinstance(made, nn.Module)
    return made


class Pooled(nn.Module):
    """A model of transformers that gives its pooled tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x).pooler_output
        return result


def _transformers(name: str) -> nn.Module:
    import_torchvision()
    transformers = import_transformers()
    config = getattr(transformers, f"{name}Config")(**_HUGGING_FACE)
    return Pooled(getattr(transformers, f"{name}Model")(config))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchvision": partial(_torchvision, 1),
    "torchvision of cosines": partial(_torchvision, 2),
    "transformers": partial(_transformers, "Swin"),
    "transformers of cosines": partial(_transformers, "Swinv2"),
}


@pytest.mark.parametrize("name", MODELS)
def test_attention_of_shifted_windows_is_one_kernel(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter_name, parameter in model.named_parameters():
        if "bias_table" in parameter_name:
            nn.init.normal_(parameter)
    x = torch.randn(BATCH, 3, 32, 32)
    extraction = npu_compiler.extract(model, (x,))
    graph = optimize(read_graph(extraction.ir))
    attention = [node for node in graph.nodes if "attention" in node.op]
    assert len(attention) == BLOCKS
    assert not [node.name for node in graph.nodes if "softmax" in node.op]
    masks = [graph.tensors[str(node.inputs["attn_mask"])].shape for node in attention]
    assert all(mask[0] == 1 for mask in masks), masks
    assert sorted(map(len, masks)) == [4, 4, 5, 5], masks  # two blocks have windows of their own each
    loaded = npu_runtime.load(extraction, device="software-metal")
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
    largest = float(expected.abs().max())
    np.testing.assert_allclose(np.asarray(loaded(x), np.float64), expected.numpy(), rtol=0, atol=TOLERANCE * largest)
    kernels = [each.entry for each in npu_compiler.compile(extraction, "cuda").main.kernels]
    assert "attention" in kernels
    assert "matmul_plain" not in kernels
