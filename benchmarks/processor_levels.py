"""The software GPU at processor levels: ResNet-18 and a small decoder in bfloat16, beside PyTorch on the same threads.

Run it as ``python -m benchmarks.processor_levels``; ``--json`` writes the figures. The levels and PyTorch take turns in
each round, so that another load of the machine is shared by all; the figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import npu_compiler
from benchmarks.decoder_sizes import SMALL
from benchmarks.resnet import machine_figures
from npu_cli.extras import import_extra, import_torchvision
from npu_cli.sample_models import photograph_crops, resnet
from npu_cli.timing import timed
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from npu_text.language_model import LanguageModel
from software_gpu.processor import ENVIRONMENT_VARIABLE, NATIVE

_PROMPT = 128
_STEPS = 4
_IMAGE, _PREFILL, _DECODE = "resnet18, one image, s", "decoder, prefill of 128, s", "decoder, one step, s"
Actions = Mapping[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.processor_levels", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--levels", nargs="+", default=[NATIVE, "x86-64-v2", "x86-64-v3"], metavar="LEVEL")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default: 15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="npu-benchmark-") as place, torch.inference_mode():
        device = Device("software-metal")
        models = _Models(Path(place), device.target)
        columns: dict[str, Actions] = {level: models.at(level) for level in args.levels}
        columns["PyTorch eager"] = models.eager()
        medians = _take_turns(columns, args.rounds)
    figures = {"machine": machine_figures(device), "rounds": args.rounds, "times": medians}
    _print(medians)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


class _Models:
    """The two models: compiled, and in PyTorch."""

    def __init__(self, folder: Path, target: str) -> None:
        import_torchvision()  # transformers imports it, where it is there
        from npu_compiler.frontend.decoder_source import load_decoder
        from npu_compiler.frontend.language_model import extract_language_model

        self.image = photograph_crops(1, seed=1)
        self.resnet = resnet("resnet18", weights="seeded").module
        self.ir = folder / "resnet18.json"
        npu_compiler.extract(self.resnet, torch.from_numpy(self.image), self.ir, model_name="resnet18")
        self.program = npu_compiler.compile(self.ir, target=target)
        self.decoder, source = folder / "decoder", folder / "source"
        import_extra("transformers", "llm").Qwen2Config(**SMALL).save_pretrained(source)
        extract_language_model(source, self.decoder, cache_length=1024, prefill=(_PROMPT,), dtype="bfloat16")
        self.model = load_decoder(source, "bfloat16", 0)
        self.prompt = np.random.default_rng(0).integers(0, SMALL["vocab_size"], _PROMPT).tolist()

    def at(self, level: str) -> Actions:
        """What is timed at a processor level; its kernels are compiled here."""
        with _level(level):
            device = Device("software-metal")
            executor = Executor(self.program, device)
            weights = load_weights(self.ir.with_suffix(".safetensors"), self.program, device)
            model = LanguageModel(self.decoder, device)
            for length in model.lengths:
                model.step(length)
        spec, result = self.program.input_specs[0], self.program.output_specs[0]

        def run() -> object:
            outputs = executor.run({spec.name: NPUBuffer.from_numpy(self.image, device, spec=spec)}, weights)
            return outputs[result.name].to_numpy(spec=result)

        sequence = model.begin()

        def decode() -> None:
            for _ in range(_STEPS):
                sequence.advance([7])

        def prefill() -> None:
            nonlocal sequence
            sequence = model.begin()
            sequence.advance(self.prompt)

        return {_IMAGE: run, _PREFILL: prefill, _DECODE: decode}

    def eager(self) -> Actions:
        """The same by PyTorch: float32 images, bfloat16 text, with transformers' own cache."""
        from npu_compiler.frontend.cached_decoder import cache_name

        cache: dict[str, Any] = {}
        image = torch.from_numpy(self.image)

        def prefill() -> None:
            nonlocal cache
            cache = {cache_name(self.model): import_extra("transformers", "llm").DynamicCache()}
            self.model(input_ids=torch.tensor([self.prompt]), use_cache=True, logits_to_keep=1, **cache)

        def decode() -> None:
            for _ in range(_STEPS):
                self.model(input_ids=torch.tensor([[7]]), use_cache=True, **cache)

        return {_IMAGE: lambda: self.resnet(image), _PREFILL: prefill, _DECODE: decode}


@contextmanager
def _level(level: str) -> Iterator[None]:
    before = os.environ.get(ENVIRONMENT_VARIABLE)
    os.environ[ENVIRONMENT_VARIABLE] = level
    try:
        yield
    finally:
        os.environ.pop(ENVIRONMENT_VARIABLE)
        if before is not None:
            os.environ[ENVIRONMENT_VARIABLE] = before


def _take_turns(columns: Mapping[str, Actions], rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of each action of each column, after one round that doesn't count."""
    seconds: dict[str, dict[str, list[float]]] = {column: {} for column in columns}
    for number in range(rounds + 1):
        for column, actions in columns.items():
            for name, action in actions.items():
                _, taken = timed(action)
                if number:
                    seconds[column].setdefault(name, []).append(taken / (_STEPS if name == _DECODE else 1))
    return {column: {name: median(times) for name, times in row.items()} for column, row in seconds.items()}


def _print(medians: Mapping[str, Mapping[str, float]]) -> None:
    table = Table("", *medians, title="milliseconds")
    for name in next(iter(medians.values())):
        table.add_row(name.removesuffix(", s"), *(f"{1000 * row[name]:.1f}" for row in medians.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
