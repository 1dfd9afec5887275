"""`npu chat`: a conversation on the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from npu_cli.progress import PREPARING, waiting
from npu_compiler.artifact.generation_spec import GenerationSpec
from npu_compiler.errors import InputError
from npu_runtime import Device
from npu_text.generator import Generator
from npu_text.sampling import Sampling
from npu_text.serving.chat_template import ChatTemplate
from npu_text.serving.vocabulary import Vocabulary

__all__ = ["execute"]


def execute(args: argparse.Namespace) -> int:
    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    Sampling(**sampling)  # refused before anything is loaded
    GenerationSpec.load(args.folder)
    template, vocabulary = ChatTemplate.load(args.folder), Vocabulary.load(args.folder)
    if template is None:
        raise InputError(
            f"'{args.folder}' has no chat template; put the model's tokenizer_config.json or chat_template.jinja "
            "there, or use npu generate"
        )
    with waiting(PREPARING):
        generator = Generator(args.folder, Device(args.device), tokenizer=vocabulary.tokenizer)
    messages: list[dict[str, Any]] = [{"role": "system", "content": args.system}] if args.system else []
    for line in _lines():
        messages.append({"role": "user", "content": line})
        tokens = vocabulary.encode(template.render(messages, None), special=False)
        answer = []
        for token in generator.generate(tokens, args.max_tokens, **sampling):
            answer.append(token.text)
            sys.stdout.write(token.text)
            sys.stdout.flush()
        print(flush=True)
        messages.append({"role": "assistant", "content": "".join(answer)})
    return 0


def _lines() -> Any:
    """What the user says; ends with the input."""
    asks = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if asks else "")
        except EOFError:
            return
        if line.strip():
            yield line
