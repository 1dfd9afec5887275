"""POST /v1/embeddings: vectors of texts, by an encoder."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_text.serving.errors import APIError, unknown_model
from npu_text.serving.protocol import EmbeddingRequest
from npu_text.serving.service import refuse_unsupported
from npu_text.serving.vocabulary import Vocabulary

__all__ = ["Embedder", "Embeddings"]


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


class Embeddings:
    """A request for embeddings, and its answer."""

    def __init__(self, embedder: Embedder, request: EmbeddingRequest) -> None:
        """Reads a request.

        Raises:
            APIError: It cannot be answered.
        """
        refuse_unsupported(request.model_extra)
        if request.model != embedder.name:
            raise unknown_model(request.model, [embedder.name])
        self._embedder, self._texts = embedder, embedder.tokens(request.input)
        self._as_text = request.encoding_format == "base64"

    async def whole(self) -> dict[str, Any]:
        """The answer.

        Raises:
            NPUError: As `Embedder.embed`.
        """
        vectors = await self._embedder.embed(self._texts)
        data = [
            {"object": "embedding", "index": number, "embedding": self._told(vector)}
            for number, vector in enumerate(vectors)
        ]
        count = sum(len(tokens) for tokens in self._texts)
        used = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self._embedder.name, "usage": used}

    def _told(self, vector: NDArray[np.float32]) -> Any:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode() if self._as_text else vector.tolist()
