"""Text to tokens and back, piece by piece as tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from npu_compiler.errors import InputError, MissingDependencyError

__all__ = ["TextStream", "Tokenizer", "encode", "load_tokenizer"]

_FILE = "tokenizer.json"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders make of bytes that are no whole character


class Tokenizer(Protocol):
    """What a generator needs of a tokenizer; those of `tokenizers` and `transformers` have it."""

    def encode(self, text: str) -> Any:
        """Token ids, or an object that has them in `ids`."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens."""


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of ``tokenizer.json``, or None where the folder has none.

    Raises:
        MissingDependencyError: The package that reads it is not installed.
        InputError: The file is damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        return None
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"'{path}' needs the package 'tokenizers', which is not installed; install the extra that has it: "
            "pip install 'npu-compiler[text]', or give token ids"
        ) from error
    try:
        return cast(Tokenizer, tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the package raises plain Exception
        raise InputError(f"'{path}' is no tokenizer ({error}); extract the model again") from error


def encode(tokenizer: Tokenizer | None, prompt: str | Sequence[int]) -> list[int]:
    """The tokens of a prompt.

    Raises:
        InputError: A text without a tokenizer or that UTF-8 cannot hold, a prompt without tokens, or ids that are no
            integers.
    """
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"given the prompt {prompt!r:.80}, which is no Unicode text ({error.reason})") from error
        if tokenizer is None:
            raise InputError(
                "given a text for a model without tokenizer; give token ids, or put the model's tokenizer.json into "
                "its folder"
            )
        encoded = tokenizer.encode(prompt)
        ids = list(getattr(encoded, "ids", encoded))
    else:
        ids = list(prompt)
    if not ids:
        raise InputError(f"given the prompt {prompt!r:.80}, which has no tokens; expected at least one")
    if not all(hasattr(token, "__index__") and not isinstance(token, bool) for token in ids):
        raise InputError(f"given the prompt {prompt!r:.80}, expected a text or token ids")
    return [int(token) for token in ids]


class TextStream:
    """Decodes tokens as they come.

    A character may take several tokens, and how a token reads may depend on the one before. So a token is decoded
    together with those of the last piece, and what is no whole character yet waits for the tokens that complete it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # tokens of the last piece
        self._open: list[int] = []  # tokens since then
        self._given = 0  # characters of the open tokens that were given already

    def push(self, *tokens: int) -> str:
        """The text that `tokens` complete; may be empty."""
        self._open += tokens
        text = self._open_text()
        whole = text.rstrip(_REPLACEMENT)
        piece = whole[self._given :]
        self._given = max(self._given, len(whole))
        if piece and whole == text:
            self._context, self._open, self._given = self._open, [], 0
        return piece

    def flush(self) -> str:
        """What is left when no token follows, incomplete characters included."""
        piece = self._open_text()[self._given :]
        self._context, self._open, self._given = [], [], 0
        return piece

    def _open_text(self) -> str:
        before = self._tokenizer.decode(self._context) if self._context else ""
        return self._tokenizer.decode([*self._context, *self._open])[len(before) :]
