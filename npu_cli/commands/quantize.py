"""`npu quantize`: a language model in half precision to one of few bits."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import Progress

from npu_cli.extras import import_extra, import_torchvision
from npu_cli.timing import timed
from npu_compiler.artifact.describe import format_bytes
from npu_compiler.errors import InputError, MissingDependencyError
from npu_text.tokenizer import encode, load_tokenizer

__all__ = ["execute"]

_MOST_SHOWN = 8
_ROW, _MOST_ROWS = 512, 8  # tokens, and how many such rows of a text are looked at


def execute(args: argparse.Namespace) -> int:
    for module in ("torch", "transformers"):
        import_extra(module, "llm")
    with suppress(MissingDependencyError):  # transformers imports it where it is there, and needs not have it
        import_torchvision()
    from npu_compiler.frontend.quantising import change_of_logits, quantise_checkpoint

    text = _text(args)
    group = None if args.group == "row" else int(args.group)
    head = args.head or ("16" if args.weights == "nf4" else "int8")
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("quantising", total=1.0)

        def tell(layer: Any, done: float) -> None:
            bar.update(task, completed=done)

        layers, seconds = timed(
            lambda: quantise_checkpoint(args.model, args.output, args.weights, group, head, tell, args.method, text)
        )
    before, after = sum(layer.before for layer in layers), sum(layer.after for layer in layers)
    judged = "outputs" if text else ""
    print(f"{'weight':48} {'stored in':22} {'before':>10} {'after':>10} {'error':>8} {judged:>8}".rstrip())
    for layer in sorted(layers, key=lambda layer: -(layer.error if layer.outputs is None else layer.outputs))[
        :_MOST_SHOWN
    ]:
        sizes = f"{format_bytes(layer.before):>10} {format_bytes(layer.after):>10}"
        outputs = "" if layer.outputs is None else f"{layer.outputs:8.2%}"
        print(f"{layer.name:48} {layer.form:22} {sizes} {layer.error:8.2%} {outputs}".rstrip())
    if len(layers) > _MOST_SHOWN:
        print(f"and {len(layers) - _MOST_SHOWN} more with smaller errors")
    if text:
        change = change_of_logits(args.model, args.output, text)
        print(
            f"logits of {change.tokens} tokens: r from {change.correlation:.5f} on, "
            f"largest change {change.largest:.3f}, the same likeliest token at {change.same:.1%}"
        )
        print(f"cross-entropy of the text: {change.before:.4f} before, {change.after:.4f} after")
    print(
        f"{args.output}: {len(layers)} weights, {format_bytes(before)} before, {format_bytes(after)} after, in "
        f"{seconds:.1f} s; next: npu extract-llm {args.output} -o DIR"
    )
    return 0


def _text(args: argparse.Namespace) -> list[list[int]]:
    """The tokens of the calibration text, in rows; none without a text."""
    if args.calibrate is None and args.ids is None:
        if args.method == "search":
            raise InputError("given --method search without a text, expected --calibrate FILE or --ids N,N beside it")
        return []
    tokens = args.ids
    if tokens is None:
        try:
            given = args.calibrate.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read '{args.calibrate}' as a text: {error}; give a file of plain text") from error
        tokens = encode(load_tokenizer(args.model), given)
    rows = [tokens[start : start + _ROW] for start in range(0, min(len(tokens), _ROW * _MOST_ROWS), _ROW)]
    return [row for row in rows if len(row) > 1] or [tokens]
