"""`npu generate`: text on the terminal as it comes."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from npu_compiler.errors import InputError
from npu_runtime import Device, Generator
from npu_runtime.generator import Generation
from npu_runtime.step_functions import partition_functions

__all__ = ["execute"]

_REASONS = {"stop": "a stop token", "length": "as many tokens as asked for", "cache": "the cache is full"}


def execute(args: argparse.Namespace) -> int:
    prompt = args.prompt if args.ids is None else args.ids
    if prompt is None:
        raise InputError('given no prompt; add --prompt "..." or --ids 1,2,3')
    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    console = Console(stderr=True, highlight=False)
    device = Device(args.device)
    plans = partition_functions(args.folder, device.target) if args.partition else None
    generator = Generator(args.folder, device, plans=plans)
    with console.status("preparing the device"):
        generation = generator.generate(prompt, args.max_tokens, **sampling)
    _stream(generation, generator.tokenizer is not None)
    timing = generation.timing
    console.print(
        f"{timing.prompt_tokens} tokens of prompt, first token after {timing.first_token_seconds:.2f} s, then "
        f"{timing.tokens_per_second:.1f} tokens/s; {timing.new_tokens} new tokens, ended by: "
        f"{_REASONS[generation.finish]}",
        soft_wrap=True,
    )
    return 0


def _stream(generation: Generation, has_text: bool) -> None:
    """Writes text, or token ids where there is no tokenizer."""
    for token in generation:
        sys.stdout.write(token.text if has_text else f"{token.id} ")
        sys.stdout.flush()
    print(flush=True)
