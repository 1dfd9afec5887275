"""Qwen2.5-1.5B in its real configuration: accuracy against PyTorch, speed and memory, through both paths.

Run it as ``python -m benchmarks.llm``; ``--tiny`` takes a small configuration, ``--json`` writes the figures. Weights
are seeded. The device's side is a process of its own, `benchmarks.llm_device`; PyTorch then gets the same tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.decoder_sizes import QWEN, TINY
from npu_cli.extras import import_extra, import_torchvision
from npu_cli.timing import timed

_PROMPT = 128
_EAGER_STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="two small layers")
    parser.add_argument("--steps", type=int, default=16, help="decode steps (default: 16)")
    parser.add_argument("--device", help="the best of this machine when omitted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    import_torchvision()  # transformers imports it, where it is there
    from npu_compiler.frontend.decoder_source import load_decoder
    from npu_compiler.frontend.language_model import extract_language_model

    with tempfile.TemporaryDirectory(prefix="npu-benchmark-") as place:
        folder, source = Path(place, "model"), Path(place, "source")
        import_extra("transformers", "llm").Qwen2Config(**TINY if args.tiny else QWEN).save_pretrained(source)
        _, extract = timed(lambda: extract_language_model(source, folder, prefill=(_PROMPT,), dtype="bfloat16"))
        runs = {
            "one program": _run_device(folder, args.steps, args.device),
            "partitioned": _run_device(folder, args.steps, args.device, "--partitioned"),
        }
        model = load_decoder(source, "bfloat16", 0)
        figures: dict[str, Any] = {"extract, s": extract, "PyTorch eager, tokens/s": _eager_rate(model)}
        wanted = {name: _eager_logits(model, tokens) for name, (_, tokens, _) in runs.items()}
        model.float()
        for name, (logits, tokens, measured) in runs.items():
            exact = _eager_logits(model, tokens)
            figures[name] = _compare(logits, wanted[name], exact) | measured
    _print(figures)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def _run_device(
    folder: Path, steps: int, device: str | None, *options: str
) -> tuple[NDArray[np.float32], list[int], dict[str, Any]]:
    """Logits [1 + steps, V], all tokens, and the figures of one run."""
    output = folder / "run.npz"
    command = [sys.executable, "-m", "benchmarks.llm_device", str(folder), str(output), "--prompt", str(_PROMPT)]
    command += ["--steps", str(steps), *options, *(["--device", device] if device else [])]
    subprocess.run(command, check=True)
    with np.load(output) as data:
        return data["logits"], data["tokens"].tolist(), json.loads(str(data["figures"]))


def _eager_logits(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    """PyTorch's logits [N, V] of the prompt's last token and of those after it, in the model's dtype."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False, logits_to_keep=len(tokens) - _PROMPT + 1)
    result: NDArray[np.float32] = logits.logits[0].float().numpy()
    return result


def _eager_rate(model: Any) -> float:
    """Tokens that PyTorch decodes in a second, with transformers' own cache."""
    transformers = import_extra("transformers", "llm")
    from npu_compiler.frontend.cached_decoder import cache_name

    token, seconds = torch.zeros(1, 1, dtype=torch.long), []
    cache = {cache_name(model): transformers.DynamicCache()}
    with torch.inference_mode():
        for _ in range(1 + _EAGER_STEPS):
            started = perf_counter()
            model(input_ids=token, use_cache=True, **cache)
            seconds.append(perf_counter() - started)
    return 1 / median(seconds[1:])


def _compare(given: NDArray[np.float32], wanted: NDArray[np.float32], exact: NDArray[np.float32]) -> dict[str, Any]:
    """How near the device comes to PyTorch in the same dtype, and both to PyTorch in float32.

    A position is decided where the two likeliest tokens lie further apart in float32 than twice the error that PyTorch
    makes in the model's dtype.
    """
    best = np.sort(exact, axis=-1)[:, -2:]
    decided = best[:, 1] - best[:, 0] > 2 * np.abs(wanted - exact).max(-1)
    same = given.argmax(-1) == wanted.argmax(-1)
    return {
        "positions": len(given),
        "same argmax": int(same.sum()),
        "decided positions": int(decided.sum()),
        "same argmax where decided": int(same[decided].sum()),
        "same top-5, as sets": _same_top(given, wanted),
        "same top-5 as float32": _same_top(given, exact),
        "same top-5 of PyTorch as float32": _same_top(wanted, exact),
        "lowest Pearson r": _lowest_correlation(given, wanted),
        "lowest Pearson r against float32": _lowest_correlation(given, exact),
        "lowest Pearson r of PyTorch against float32": _lowest_correlation(wanted, exact),
    }


def _same_top(a: NDArray[np.float32], b: NDArray[np.float32]) -> int:
    """Positions where the five likeliest tokens are the same, in any order."""
    best = (np.argsort(-logits, kind="stable")[:, :5] for logits in (a, b))
    return sum(set(x) == set(y) for x, y in zip(*best, strict=True))


def _lowest_correlation(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return min(float(np.corrcoef(*rows)[0, 1]) for rows in zip(a, b, strict=True))


def _print(figures: dict[str, Any]) -> None:
    runs = {name: value for name, value in figures.items() if isinstance(value, dict)}
    others = ", ".join(f"{name}: {value:.1f}" for name, value in figures.items() if name not in runs)
    table = Table("", *runs, title=others)
    for key in dict.fromkeys(key for run in runs.values() for key in run):
        table.add_row(key, *(_text(run.get(key, "")) for run in runs.values()))
    Console().print(table)


def _text(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
