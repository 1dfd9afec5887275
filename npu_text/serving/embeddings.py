"""Embeddings of texts, by an encoder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_text.serving.errors import APIError
from npu_text.serving.vocabulary import Vocabulary

__all__ = ["Embedder"]


class Embedder:
    """An encoder behind the API.

    Attributes:
        name: By which clients ask for it.
        length: Tokens of a text, at most.
    """

    def __init__(
        self, name: str, vocabulary: Vocabulary, length: int, encode: Callable[[Sequence[int]], NDArray[np.float32]]
    ) -> None:
        """An encoder.

        Args:
            name: By which clients ask for it.
            vocabulary: Its tokens.
            length: Tokens of a text, at most.
            encode: Gives the vector of a text's tokens; called by one thread at a time.
        """
        self.name, self.length = name, length
        self._vocabulary, self._encode = vocabulary, encode
        self._turn = asyncio.Lock()

    def tokens(self, texts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
        """The tokens of texts.

        Raises:
            APIError: One is empty, too long, or no text.
        """
        given: Any = [texts] if isinstance(texts, str) or isinstance(texts[0], int) else texts
        try:
            tokens = [self._vocabulary.encode(t, special=True) if isinstance(t, str) else list(t) for t in given]
        except InputError as error:
            raise APIError(str(error), param="input") from error
        wrong = next((len(one) for one in tokens if not 0 < len(one) <= self.length), None)
        if wrong is not None:
            raise APIError(f"given a text of {wrong} tokens, expected 1 to {self.length}", param="input")
        return tokens

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """The vectors of texts, of length 1.

        Raises:
            NPUError: The device failed, or a token is none of the model's.
        """
        vectors = []
        for tokens in texts:
            async with self._turn:  # others get their turn between two texts
                vector = await asyncio.to_thread(self._encode, tokens)
            vectors.append(vector / max(float(np.linalg.norm(vector)), 1e-12))
        return vectors
