"""How far rounding alone moves the logits of a Qwen2.5-1.5B whose activations are codes, in PyTorch on the CPU.

Run it as ``python -m benchmarks.rounded_activations``; ``--json`` writes the figures. A value that rounds to another
code moves by a step of the codes, however little it differed. So two computations of the same codes, one in bfloat16
and one in float32, tell what agreement a third can have with either.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.initialization import no_init_weights

from benchmarks.decoder_sizes import QWEN
from npu_cli.extras import import_torchvision

__all__ = ["main"]

_KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_DEVIATION = 0.02


class _Linear(torch.nn.Module):
    """A linear whose weight is codes by row, and whose input is rounded to codes where that is asked for."""

    rounds = True

    def __init__(self, rows: int, columns: int, kind: torch.dtype) -> None:
        super().__init__()
        self._codes, self._scales = torch.ops.npu_codes.quantize(torch.randn(rows, columns) * _DEVIATION, kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rounds:
            codes, scales = torch.ops.npu_codes.quantize(x, self._codes.dtype)
            x = (codes.float() * scales.reshape(*x.shape[:-1], 1)).to(x.dtype)
        weight = self._codes.float() * self._scales.reshape(-1, 1)
        return torch.nn.functional.linear(x, weight.to(x.dtype))


def _model(kind: torch.dtype) -> Any:
    with no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(Qwen2Config(**QWEN), dtype=torch.bfloat16).eval()
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            model.set_submodule(name, _Linear(module.out_features, module.in_features, kind))
    model.tie_weights()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, _DEVIATION)
        else:
            parameter.data.fill_(1)
    return model


def _logits(model: Any, tokens: torch.Tensor) -> Iterator[tuple[tuple[str, bool], NDArray[np.float64]]]:
    """The last token's [V]: by the type that is computed in, and by whether activations are rounded."""
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        for rounds in (False, True):
            _Linear.rounds = rounds
            with torch.inference_mode():
                yield (str(dtype), rounds), model(tokens, logits_to_keep=1).logits.double().numpy().reshape(-1)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rounded_activations", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    import_torchvision()  # transformers imports it, where it is there
    import npu_compiler.frontend.coded_operator  # noqa: F401, defines npu_codes::quantize

    figures = {}
    for name, kind in _KINDS.items():
        torch.manual_seed(0)
        model = _model(kind)
        found = dict(_logits(model, torch.randint(0, QWEN["vocab_size"], (1, args.tokens))))
        narrow, wide = str(torch.bfloat16), str(torch.float32)
        pairs = {
            "rounded, bfloat16 and float32": ((narrow, True), (wide, True)),
            "not rounded, bfloat16 and float32": ((narrow, False), (wide, False)),
            "float32, rounded and not": ((wide, True), (wide, False)),
        }
        figures[name] = {words: float(np.corrcoef(found[a], found[b])[0, 1]) for words, (a, b) in pairs.items()}
        print(name, json.dumps(figures[name]), flush=True)
    if args.json is not None:
        made = {"torch": torch.__version__, "tokens": args.tokens, "Pearson r of logits": figures}
        args.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
