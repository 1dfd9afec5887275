"""Text from a language model: a prompt in, tokens out as they come."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError, MissingDependencyError
from npu_compiler.partitioner import PartitionPlan
from npu_runtime.device import Device
from npu_text.device_decoding import decode_on_device
from npu_text.host_decoding import decode_on_host
from npu_text.language_model import LanguageModel, TokenSequence, plan_chunks
from npu_text.sampling import Sampling
from npu_text.step_functions import Tensor
from npu_text.tokenizer import TextStream, Tokenizer, encode, load_tokenizer

__all__ = ["Decoding", "Generation", "Generator", "Timing", "Token"]

Decoding = Callable[[TokenSequence, Sampling, int], Callable[[Tensor], Iterator[int]]]
"""How tokens are chosen and fed back. Given a sequence that is still empty, how to choose, and the most tokens that
anybody will ask for, it gives what goes from the logits of the prompt's last token to the tokens that follow. The
reader stops when it has enough; a device that chooses by itself may run ahead of it."""


class Token(NamedTuple):
    """A token, and the text that it completes: empty inside a character, and without a tokenizer."""

    id: int
    text: str


@dataclass
class Timing:
    """Where the time went; the time that the reader of the tokens takes does not count.

    Attributes:
        prompt_tokens, new_tokens: How many.
        first_token_seconds: From the prompt's tokens to the first new one.
        decode_seconds: For the new tokens after the first.
    """

    prompt_tokens: int
    new_tokens: int = 0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, after the first; 0 before there are any."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 else 0.0

    def add(self, seconds: float) -> None:
        """Counts a token that took so long."""
        if self.new_tokens:
            self.decode_seconds += seconds
        else:
            self.first_token_seconds = seconds
        self.new_tokens += 1


class Generation(Iterator[Token]):
    """A text in the making: an iterator over its tokens, each computed when it is asked for, or a little ahead.

    Attributes:
        timing: Of the tokens so far.
        finish: Why it ended: ``stop`` (a stop token, which is the last one given), ``length`` (as many tokens as asked
            for) or ``cache`` (the cache is full); empty before.
    """

    def __init__(
        self,
        tokens: Iterator[int],
        timing: Timing,
        text: TextStream | None,
        *,
        limit: int,
        full: int,
        stop: Collection[int],
    ) -> None:
        """For `Generator.generate`: ends after `limit` tokens, at the latest when the cache is `full`."""
        self.timing, self.finish = timing, ""
        self._tokens, self._text = tokens, text
        self._limit, self._full, self._stop = limit, full, stop

    def __next__(self) -> Token:
        """The next token.

        Raises:
            DeviceError: The device failed, or gave logits that are no numbers.
        """
        if self.finish:
            raise StopIteration
        started = perf_counter()
        token = next(self._tokens)
        self.timing.add(perf_counter() - started)
        self.finish = self._finished(token)
        return Token(token, self._text_of(token))

    def _finished(self, token: int) -> str:
        if token in self._stop:
            return "stop"
        if self.timing.new_tokens >= self._limit:
            return "length"
        return "cache" if self.timing.new_tokens >= self._full else ""

    def _text_of(self, token: int) -> str:
        if self._text is None:
            return ""
        piece = self._text.push(token)
        return piece + self._text.flush() if self.finish else piece


class Generator:
    """Generates text with a language model that `npu extract-llm` made.

    Each text has caches of its own; the weights and the compiled functions are shared by all.

    Attributes:
        model: The functions on the device.
        tokenizer: Between text and tokens; None where there is none.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        device: Device | str | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        program: CompiledProgram | None = None,
        plans: Mapping[str, PartitionPlan] | None = None,
        decoding: Decoding | None = None,
    ) -> None:
        """Compiles the model at its first use on a kind of device, and loads the weights, with a bar on a terminal.

        Args:
            folder: What `npu extract-llm` made.
            device: Where to run, or its name; the best of the machine when omitted.
            tokenizer: An object with ``encode`` and ``decode``; the folder's own when omitted.
            program: The folder's functions, already compiled.
            plans: The folder's functions, partitioned: what `npu_compiler.partition` gave for each IR, by the names in
                ``generation.json``. What the device cannot do then runs on the CPU.
            decoding: How tokens are chosen and fed back; when omitted, on the device where it runs ahead of the host
                (CUDA) and does all of a step, else step by step.

        Raises:
            IRError: The folder is no such model, or is incomplete.
            WeightError: The weights are missing or another model's.
            DeviceError: There is no such device, or it has too little memory.
        """
        if not isinstance(folder, str | os.PathLike):
            raise InputError(
                f"given a {type(folder).__name__} as folder, expected the path of one that `npu extract-llm` made"
            )
        chosen = Device.of(device)
        self._no_text: MissingDependencyError | None = None
        try:
            self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(Path(folder))
        except MissingDependencyError as error:  # token ids do without
            self.tokenizer, self._no_text = None, error
        self.model = LanguageModel(Path(folder), chosen, program, plans)
        self._decoding = decoding

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Collection[int] | None = None,
    ) -> Generation:
        """Continues a prompt.

        Args:
            prompt: A text, or token ids.
            max_new_tokens: The most tokens to give; when omitted, as many as the cache holds.
            temperature, top_k, top_p, seed: How to choose; `sampling.Sampling` explains them. Greedy when omitted.
            stop: Tokens that end the text; the model's own when omitted.

        Returns:
            An iterator over the new tokens, with caches of its own. The functions that it needs are ready; nothing has
            run yet.

        Raises:
            InputError: A text without a tokenizer, a prompt that the cache cannot hold, tokens that the model does not
                have, or a number out of its range.
            MissingDependencyError: A text, and the package that reads the folder's tokenizer is not installed.
        """
        sampling = Sampling(temperature, top_k, top_p, seed)
        if isinstance(prompt, str) and self._no_text is not None:
            raise self._no_text
        tokens = encode(self.tokenizer, prompt)
        self._check(tokens, max_new_tokens)
        spec = self.model.spec
        chunks = plan_chunks(0, len(tokens), self.model.lengths, spec.cache_length)
        for length in {1, *(chunk.length for chunk in chunks)}:
            self.model.step(length)
        full = spec.cache_length - len(tokens) + 1  # the last token need not enter the cache
        stops = frozenset(spec.stop_ids if stop is None else stop)
        timing, limit = Timing(len(tokens)), max_new_tokens or full + 1
        text = TextStream(self.tokenizer) if self.tokenizer is not None else None
        sequence = self.model.begin()
        decode = self._chosen_decoding()(sequence, sampling, min(limit, full))
        return Generation(_run(sequence, tokens, decode), timing, text, limit=limit, full=full, stop=stops)

    def _chosen_decoding(self) -> Decoding:
        if self._decoding is not None:
            return self._decoding
        ahead = self.model.device.backend.runs_ahead and self.model.updates_in_place
        return decode_on_device if ahead else decode_on_host

    def _check(self, tokens: list[int], max_new_tokens: int | None) -> None:
        spec = self.model.spec
        if len(tokens) > spec.cache_length:
            raise InputError(
                f"given a prompt of {len(tokens)} tokens, expected at most {spec.cache_length}, which the cache holds; "
                "shorten it, or extract the model with a longer cache: npu extract-llm --cache"
            )
        wrong = next((token for token in tokens if not 0 <= token < spec.vocabulary), None)
        if wrong is not None:
            raise InputError(f"given the token {wrong}, expected 0 to {spec.vocabulary - 1}, which {spec.model} knows")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise InputError(f"given max_new_tokens={max_new_tokens}, expected at least 1")


def _run(sequence: TokenSequence, tokens: list[int], decode: Callable[[Tensor], Iterator[int]]) -> Iterator[int]:
    yield from decode(sequence.advance(tokens))
