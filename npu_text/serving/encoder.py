"""Encoders for embeddings: a model that `npu_compiler.extract` took to IR, beside its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_model.model import Model, load
from npu_runtime.device import Device
from npu_text.serving.embeddings import Embedder
from npu_text.serving.vocabulary import Vocabulary

__all__ = ["open_encoder"]

_MASKS, _TYPES, _POSITIONS = ("attention_mask",), ("token_type_ids",), ("position_ids",)
_BESIDE = frozenset({"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"})


def open_encoder(name: str, folder: Path, device: Device, vocabulary: Vocabulary) -> Embedder:
    """An encoder of a folder: one ``.npubin``, or IR, with its ``.safetensors``.

    Its first input has the tokens [1, L]; others may be called ``attention_mask``, ``token_type_ids`` and
    ``position_ids``. Its first output has a vector for each token [1, L, H], of which the mean is taken over the tokens
    of the text, or one for the text [1, H].

    Raises:
        InputError: The folder has no such model.
        NPUError: As `npu_model.load`.
    """
    programs = sorted(folder.glob("*.npubin"))
    irs = sorted(path for path in folder.glob("*.json") if path.name not in _BESIDE)
    weights = sorted(folder.glob("*.safetensors"))
    files = programs or irs
    if len(files) != 1 or len(weights) != 1:
        raise InputError(
            f"'{folder}' holds neither a language model (npu extract-llm --lanes) nor an encoder, which is one .npubin "
            "or IR with one .safetensors file"
        )
    model = load(files[0], weights[0], device)
    shape = model.inputs[0].shape
    known = (*_MASKS, *_TYPES, *_POSITIONS)
    strange = next((spec.name for spec in model.inputs[1:] if spec.name not in known), None)
    if len(shape) != 2 or shape[0] != 1 or strange is not None:
        raise InputError(
            f"the encoder in '{folder}' takes {strange or model.inputs[0]}, expected tokens [1, L], and beside them "
            f"only {', '.join(known)}"
        )
    return Embedder(name, vocabulary, shape[1], _Encoder(model))


class _Encoder:
    """Texts to vectors, one at a time."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._masked = any(spec.name in _MASKS for spec in model.inputs)

    def __call__(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        first, *others = self._model.inputs
        length, count = first.shape[1], len(tokens)
        held = np.zeros((1, length), np.int64)
        held[0, :count] = tokens
        inputs: dict[str, Any] = {first.name: held}
        for spec in others:
            inputs[spec.name] = self._beside(spec.name, length, count)
        result: Any = self._model(inputs)
        if isinstance(result, dict):
            result = next(iter(result.values()))
        elif isinstance(result, list | tuple):
            result = result[0]
        vectors: NDArray[np.float32] = np.asarray(result, np.float32)[0]
        return vectors[:count].mean(axis=0, keepdims=True)[0] if vectors.ndim == 2 else vectors

    @staticmethod
    def _beside(name: str, length: int, count: int) -> NDArray[np.int64]:
        if name in _POSITIONS:
            return np.arange(length)[None]
        array = np.zeros((1, length), np.int64)
        if name in _MASKS:
            array[0, :count] = 1
        return array
