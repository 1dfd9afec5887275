"""Shows where the time of a model goes, kernel by kernel. ``python examples/profile_model.py``."""

from __future__ import annotations

import numpy as np
import torch

import npu_compiler
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from npu_runtime.profiler import Profiler


def main() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(64),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(64, 64, 3, padding=1),
        torch.nn.SiLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 10),
        torch.nn.Softmax(dim=-1),
    ).eval()
    device = Device()
    extraction = npu_compiler.extract(model, torch.zeros(1, 3, 64, 64), model_name="example")
    program = npu_compiler.compile(extraction.ir, target=device.target)
    arrays = {name: tensor.numpy() for name, tensor in extraction.weights.items()}
    weights = load_weights(arrays, program, device)
    profiler = Profiler(Executor(program, device))
    (source,) = program.input_specs
    image = np.random.default_rng(0).standard_normal(source.shape).astype(np.float32)
    for _ in range(5):
        profiler.run({source.name: NPUBuffer.from_numpy(image, device, spec=source)}, weights)
    profiler.print_summary()


if __name__ == "__main__":
    main()
