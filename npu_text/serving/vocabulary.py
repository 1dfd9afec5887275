"""The tokens of a model one by one: their bytes, as log-probabilities and grammars need them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npu_compiler.errors import InputError
from npu_text.tokenizer import load_tokenizer

__all__ = ["Vocabulary"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_LONG = 8192  # characters from which a text goes to the call that lets other threads of Python run meanwhile
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes the space before a word


class Vocabulary:
    """A tokenizer of `tokenizers`, and what servers ask of it beyond text and tokens.

    Attributes:
        tokenizer: Itself; it has ``encode`` and ``decode``.
        json: Its file.
    """

    def __init__(self, content: str, tokenizer: Any) -> None:
        """From the text of a ``tokenizer.json``, and what was read from it."""
        self.json, self.tokenizer = content, tokenizer
        self._bytes_of = _byte_letters() if _has_kind(json.loads(content).get("decoder"), "ByteLevel") else None
        added = tokenizer.get_added_tokens_decoder()
        self._added: dict[int, str] = {token: entry.content for token, entry in added.items()}

    @classmethod
    def load(cls, folder: Path) -> Vocabulary:
        """That of a model's folder.

        Raises:
            MissingDependencyError: The package that reads it is not installed.
            InputError: The folder has none, or a damaged one.
        """
        tokenizer = load_tokenizer(folder)
        if tokenizer is None:
            raise InputError(
                f"'{folder}' has no tokenizer.json, which makes tokens of a text; put the model's file there"
            )
        return cls((folder / "tokenizer.json").read_text(encoding="utf-8"), tokenizer)

    def encode(self, text: str, special: bool) -> list[int]:
        """The tokens of a text.

        Args:
            text: Which; names of special tokens in it are these tokens.
            special: Whether tokens that begin or end a text are put around it.

        Raises:
            InputError: It is no Unicode text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"given {text!r:.80}, which is no Unicode text ({error.reason})") from error
        if len(text) < _LONG:
            short: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
            return short
        long: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return long

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, those left out that are no text."""
        text: str = self.tokenizer.decode(list(tokens))
        return text

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for, which may be part of a character."""
        if token in self._added:
            return self._added[token].encode()
        name: str | None = self.tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self._bytes_of is not None:
            letters = self._bytes_of
            return bytes(letters[letter] for letter in name) if all(c in letters for c in name) else name.encode()
        if match := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        return name.replace(_WORD_START, " ").encode()

    def text_of(self, token: int) -> str:
        """A token as text; parts of characters are shown as replacement characters."""
        return self.bytes_of(token).decode(errors="replace")


def _has_kind(decoder: Any, kind: str) -> bool:
    """Whether a decoder, or one that it is made of, is of a kind."""
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == kind or any(_has_kind(part, kind) for part in decoder.get("decoders", ()))


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level tokenizers write for each byte (GPT-2's `bytes_to_unicode`), the other way round."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}
