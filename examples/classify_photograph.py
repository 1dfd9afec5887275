"""Classifies a photograph with ResNet-18: extract, compile, run. ``python examples/classify_photograph.py``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

import npu_compiler
from npu_cli.images import load_image, photograph, preprocess
from npu_cli.sample_models import resnet
from npu_runtime import Device, Executor, NPUBuffer, load_weights


def main() -> None:
    sample = resnet("resnet18")
    image = preprocess(load_image(photograph("coffee.png")), 224, 224)
    with tempfile.TemporaryDirectory() as folder:
        ir = Path(folder, "resnet18.json")
        npu_compiler.extract(sample.module, torch.from_numpy(image), ir)
        device = Device()
        program = npu_compiler.compile(ir, target=device.target)
        weights = load_weights(ir.with_suffix(".safetensors"), program, device)
    executor = Executor(program, device)
    (source,), (result,) = program.input_specs, program.output_specs
    outputs = executor.run({source.name: NPUBuffer.from_numpy(image, device, spec=source)}, weights)
    logits = outputs[result.name].to_numpy(spec=result)[0]
    for index in np.argsort(-logits)[:5]:
        print(f"{logits[index]:8.2f}  {sample.classes[index] if sample.classes else f'class {index}'}")


if __name__ == "__main__":
    main()
