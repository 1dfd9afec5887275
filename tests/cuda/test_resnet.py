"""ResNets on a CUDA device against PyTorch in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import npu_compiler
from cuda_runtime import CUDAExecutor
from npu_cli.sample_models import photograph_crops, resnet
from npu_runtime import Device, NPUBuffer, load_weights


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("batch", [1, 6])
def test_resnet_gives_what_pytorch_gives(name: str, batch: int, device: Device, tmp_path: Path) -> None:
    module = resnet(name, weights="seeded").module
    images = photograph_crops(batch, seed=2)
    ir = tmp_path / f"{name}.json"
    npu_compiler.extract(module, torch.from_numpy(images), ir, model_name=name)
    program = npu_compiler.compile(ir, target="cuda")
    weights = load_weights(ir.with_suffix(".safetensors"), program, device)
    executor = CUDAExecutor(program, device)
    source, result = program.input_specs[0], program.output_specs[0]
    given = {source.name: NPUBuffer.from_numpy(images, device, spec=source)}
    logits = executor.run(given, weights)[result.name].to_numpy(spec=result)
    with torch.inference_mode():
        expected = module(torch.from_numpy(images)).numpy()
    for ours, theirs in zip(logits.astype(np.float64), expected.astype(np.float64), strict=True):
        assert np.corrcoef(ours, theirs)[0, 1] > 0.9999
        assert list(np.argsort(-ours)[:5]) == list(np.argsort(-theirs)[:5])
    again = executor.run(given, weights)[result.name].to_numpy(spec=result)
    np.testing.assert_array_equal(again, logits)
