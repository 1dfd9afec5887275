"""Decode steps of one decoder in bfloat16 and in weights of few bits, in turns in one process: time, bytes, agreement.

Run it as ``python -m benchmarks.llm_quantised``; ``--json`` writes the figures. The layers have the sizes of
Qwen2.5-1.5B, so that their weights exceed a processor's caches; there are two of them, seeded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.decoder_sizes import QWEN
from npu_cli.extras import import_extra, import_torchvision
from npu_runtime import Device, Generator, NPUBuffer

_SIZES: dict[str, Any] = QWEN | {"num_hidden_layers": 2, "vocab_size": 8192, "max_position_embeddings": 2048}
_SIZES |= {"bos_token_id": None, "eos_token_id": None}

_FORMS: dict[str, tuple[str, int | None, str] | None] = {
    "bfloat16": None,
    "int8, a scale for each row": ("int8", None, "int8"),
    "int8 in groups of 128": ("int8", 128, "int8"),
    "int4 in groups of 64": ("int4", 64, "int8"),
    "int4, a scale for each row": ("int4", None, "int8"),
    "nf4 in groups of 64": ("nf4", 64, "16"),
    "fp8, a scale for each row": ("fp8", None, "int8"),
}
"""What weights become, columns that share a scale, and what the head becomes; None where they stay."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.llm_quantised", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=24, help="decode steps of each form (default: 24)")
    parser.add_argument("--layers", type=int, default=2, help="layers of the decoder (default: 2)")
    parser.add_argument("--only", default="", help="measure the forms whose name contains this, beside bfloat16")
    parser.add_argument("--device", help="the best of this machine when omitted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    import_torchvision()  # transformers imports it, where it is there
    device = Device(args.device)
    names = [name for name, form in _FORMS.items() if form is None or args.only in name]
    with tempfile.TemporaryDirectory(prefix="npu-benchmark-") as place:
        generators = {name: _generator(name, Path(place), args.layers, device) for name in names}
        figures = _measure(generators, args.steps)
    _print(figures)
    if args.json is not None:
        made = {"device": device.backend.name, "layers": args.layers, "forms": figures}
        args.json.write_text(json.dumps(made, indent=2) + "\n")


def _generator(name: str, place: Path, layers: int, device: Device) -> Generator:
    """The decoder in a form, on the device."""
    import torch

    from npu_compiler.frontend.decoder_source import load_decoder
    from npu_compiler.frontend.language_model import extract_language_model
    from npu_compiler.frontend.quantising import quantise_checkpoint

    plain, form = place / "plain", _FORMS[name]
    if not plain.exists():
        config = import_extra("transformers", "llm").Qwen2Config(**_SIZES | {"num_hidden_layers": layers})
        config.save_pretrained(place / "configuration")
        load_decoder(place / "configuration", "bfloat16", 0).to(torch.bfloat16).save_pretrained(plain)
    source = plain
    if form is not None:
        source = place / f"{name}, quantised"
        weights, group, head = form
        quantise_checkpoint(plain, source, weights, group, head)
    extract_language_model(source, place / name, prefill=(), dtype="bfloat16", cache_length=512)
    return Generator(place / name, device)


def _measure(generators: dict[str, Generator], steps: int) -> dict[str, dict[str, Any]]:
    """One step of each form after another, so that what else the machine does slows all of them."""
    tokens = np.random.default_rng(0).integers(0, _SIZES["vocab_size"], 1 + steps).tolist()
    sequences = {name: generator.model.begin() for name, generator in generators.items()}
    seconds: dict[str, list[float]] = {name: [] for name in generators}
    logits: dict[str, list[NDArray[np.float32]]] = {name: [] for name in generators}
    for token in tokens:
        for name, sequence in sequences.items():
            started = perf_counter()
            row: Any = sequence.advance([token])
            array = row.to_numpy() if isinstance(row, NPUBuffer) else np.asarray(row)
            seconds[name].append(perf_counter() - started)
            logits[name].append(array.astype(np.float32).reshape(-1))
    plain = next(iter(generators))
    own = median(seconds[plain][1:])
    return {
        name: {
            "ms": median(times[1:]) * 1e3,
            "times as fast": own / median(times[1:]),
            "weights on the device, bytes": generators[name].model.functions.weights.nbytes,  # type: ignore[attr-defined]
            "lowest Pearson r to bfloat16": _lowest_correlation(logits[name], logits[plain]),
        }
        for name, times in seconds.items()
    }


def _lowest_correlation(a: Sequence[NDArray[np.float32]], b: Sequence[NDArray[np.float32]]) -> float:
    return min(float(np.corrcoef(*rows)[0, 1]) for rows in zip(a, b, strict=True))


def _print(figures: dict[str, dict[str, Any]]) -> None:
    table = Table("weights", title="Decode steps", title_justify="left")
    for heading in ("ms", "times as fast", "MB", "lowest r"):
        table.add_column(heading, justify="right")
    for name, row in figures.items():
        megabytes = row["weights on the device, bytes"] / 1e6
        cells = f"{row['ms']:.1f}", f"{row['times as fast']:.2f}", f"{megabytes:.0f}"
        table.add_row(name, *cells, f"{row['lowest Pearson r to bfloat16']:.5f}")
    Console().print(table)


if __name__ == "__main__":
    main()
