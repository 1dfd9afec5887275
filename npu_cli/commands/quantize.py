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
from npu_compiler.errors import MissingDependencyError

__all__ = ["execute"]

_MOST_SHOWN = 8


def execute(args: argparse.Namespace) -> int:
    for module in ("torch", "transformers"):
        import_extra(module, "llm")
    with suppress(MissingDependencyError):  # transformers imports it where it is there, and needs not have it
        import_torchvision()
    from npu_compiler.frontend.quantising import quantise_checkpoint

    group = None if args.group == "row" else int(args.group)
    head = args.head or ("16" if args.weights == "nf4" else "int8")
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("quantising", total=1.0)

        def tell(layer: Any, done: float) -> None:
            bar.update(task, completed=done)

        layers, seconds = timed(
            lambda: quantise_checkpoint(args.model, args.output, args.weights, group, head, tell=tell)
        )
    before, after = sum(layer.before for layer in layers), sum(layer.after for layer in layers)
    print(f"{'weight':48} {'stored in':22} {'before':>10} {'after':>10} {'error':>8}")
    for layer in sorted(layers, key=lambda layer: -layer.error)[:_MOST_SHOWN]:
        sizes = f"{format_bytes(layer.before):>10} {format_bytes(layer.after):>10}"
        print(f"{layer.name:48} {layer.form:22} {sizes} {layer.error:8.2%}")
    if len(layers) > _MOST_SHOWN:
        print(f"and {len(layers) - _MOST_SHOWN} more with smaller errors")
    print(
        f"{args.output}: {len(layers)} weights, {format_bytes(before)} before, {format_bytes(after)} after, in "
        f"{seconds:.1f} s; next: npu extract-llm {args.output} -o DIR"
    )
    return 0
