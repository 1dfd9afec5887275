"""`npu generate`: text on the terminal as it comes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import chain, islice

from rich.console import Console

from npu_cli.lowering import telling_all
from npu_cli.progress import PREPARING, waiting
from npu_compiler.artifact.describe import counted
from npu_compiler.artifact.generation_spec import GenerationSpec
from npu_compiler.errors import InputError
from npu_runtime import Device
from npu_text.generator import Generator, Token
from npu_text.sampling import Sampling
from npu_text.step_functions import open_program, partition_functions
from npu_text.tokenizer import encode, load_tokenizer

__all__ = ["execute"]

_REASONS = {"stop": "a stop token", "length": "as many tokens as asked for", "cache": "the cache is full"}


def execute(args: argparse.Namespace) -> int:
    tokens = _prompt(args)
    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    Sampling(**sampling)  # refused before anything is loaded
    generator = _open(args)
    with waiting(PREPARING):
        generation = generator.generate(tokens, args.max_tokens, **sampling)
    with waiting(f"reading {counted(len(tokens), 'token')} of prompt"):
        first = list(islice(generation, 1))
    _stream(chain(first, generation), generator.tokenizer is not None)
    timing = generation.timing
    Console(stderr=True, highlight=False).print(
        f"{counted(timing.prompt_tokens, 'token')} of prompt, first token after {timing.first_token_seconds:.2f} s, "
        f"then {timing.tokens_per_second:.1f} tokens/s; {counted(timing.new_tokens, 'new token')}, ended by: "
        f"{_REASONS[generation.finish]}",
        soft_wrap=True,
    )
    return 0


def _prompt(args: argparse.Namespace) -> list[int]:
    """The prompt's tokens; token ids need no tokenizer."""
    if args.ids is not None:
        return encode(None, args.ids)
    if args.prompt is None:
        raise InputError('given no prompt; add --prompt "..." or --ids 1,2,3')
    GenerationSpec.load(args.folder)  # a folder that is no model is told first
    return encode(load_tokenizer(args.folder), args.prompt)


def _open(args: argparse.Namespace) -> Generator:
    """The model on its device; compiled, or divided, where that was not done before."""
    device, spec = Device(args.device), GenerationSpec.load(args.folder)
    if args.partition:
        with waiting("dividing the model between device and CPU"):
            plans = partition_functions(args.folder, device.target)
        return Generator(args.folder, device, plans=plans)
    sources = [args.folder / step.ir for step in spec.functions.values()]
    remedy = f"npu generate {args.folder} --partition"
    with telling_all(sources, device.target, remedy), waiting("compiling the model"):
        program = open_program(args.folder, {name: step.ir for name, step in spec.functions.items()}, device.target)
    return Generator(args.folder, device, program=program)


def _stream(tokens: Iterator[Token], has_text: bool) -> None:
    """Writes text, or token ids where there is no tokenizer."""
    for token in tokens:
        sys.stdout.write(token.text if has_text else f"{token.id} ")
        sys.stdout.flush()
    print(flush=True)
