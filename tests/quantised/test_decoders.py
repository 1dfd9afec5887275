"""Quantised checkpoints from the folder to logits on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_runtime import Device, Generator
from tests.quantised import encoders
from tests.support.quantised import Encoded, extracted, write_checkpoint

TOKENS = [5, 17, 40, 3, 8, 250, 31, 77]
GROUP = 32


def compressed(bits: int, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return {"quantization_config": section | {"ignore": ["lm_head"]}}


def check(source: Path, model: Any, target: Path, device: Device) -> None:
    """Compares a prefill and a decode step with PyTorch's logits in float32, and the weights' bytes with the file's."""
    decoder = extracted(source, model, target)
    generator = Generator(decoder.folder, device)
    sequence = generator.model.begin()
    rows = [sequence.advance(TOKENS[:-1]), sequence.advance(TOKENS[-1:])]
    expected = decoder.logits(TOKENS, torch.float32)[-2:].numpy()
    for row, wanted in zip(rows, expected, strict=True):
        given = np.asarray(row.to_numpy()).astype(np.float32).reshape(-1)
        assert np.corrcoef(given, wanted)[0, 1] > 0.9995
    size = (source if source.is_file() else source / "model.safetensors").stat().st_size
    assert (target / "model.safetensors").stat().st_size < 1.02 * size + 40_000  # of headers and rotary angles


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False)])
def test_compressed_tensors(bits: int, symmetric: bool, tmp_path: Path, device: Device) -> None:
    def encode(name: str, weight: torch.Tensor) -> Encoded | None:
        if name in ("lm_head", "model.embed_tokens"):
            return None
        return encoders.pack_quantized(weight, bits, GROUP, symmetric, torch.bfloat16)

    model = write_checkpoint(tmp_path / "source", compressed(bits, symmetric), encode, torch.bfloat16)
    check(tmp_path / "source", model, tmp_path / "model", device)
