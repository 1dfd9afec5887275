"""A language model with its key/value cache as inputs and outputs: a pure function, as the compiler wants it."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.cache_utils import Cache, CacheLayerMixin

from npu_compiler.frontend.cache_forms import PlainRows, RowForm

__all__ = ["CacheLayer", "CachedDecoder", "attention_of", "cache_name", "cache_shapes", "run_decoder"]


class CachedDecoder(torch.nn.Module):
    """Some tokens of one sequence: their keys and values go into the cache, the last one's logits come out.

    The position of a token is also its place in the cache. A token sees the places up to its own, so that places behind
    the end of the sequence may hold anything finite.
    """

    def __init__(self, model: Any, form: RowForm | None = None) -> None:
        """Wraps `model`, one of transformers' `AutoModelForCausalLM`; `form` says what caches hold, if not numbers."""
        super().__init__()
        self.model = model
        self._form: RowForm = form or PlainRows(model.dtype)
        self.eval()

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Runs the model.

        Args:
            tokens: int64 [1, N].
            positions: int64 [N].
            caches: For each layer, of its keys [1, G, L, D] and of its values [1, G, L, E]; each in as many tensors as
                its form has.
            last: int64 [1], the index of the last token among the N; not needed for N = 1.

        Returns:
            The logits [1, 1, V], and the new caches in the order of the given ones.
        """
        each = 2 * self._form.tensors
        starts = range(0, len(caches), each)
        layers = [_FunctionalLayer(caches[at : at + each], positions, self._form) for at in starts]
        visible = torch.arange(caches[0].shape[2]) <= positions[:, None]
        return run_decoder(self.model, layers, last, tokens, visible[None, None], positions[None])


def run_decoder(
    model: Any,
    layers: Sequence[CacheLayer],
    last: torch.Tensor | None,
    tokens: torch.Tensor,
    visible: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Runs a decoder of transformers over caches of ours.

    Args:
        model: One of transformers' `AutoModelForCausalLM`.
        layers: The caches, which the run updates.
        last: int64 [1], the index of the token whose logits are wanted, of a single text; None for those of all.
        tokens: int64 [B, N].
        visible: Booleans [B, 1, N, L]: which places of the caches each token sees.
        positions: int64 [B, N].

    Returns:
        The logits, and the new caches, of each layer its keys and its values.
    """
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, hidden: hidden if last is None else torch.index_select(hidden[0], 1, last)
    )
    try:
        output = model(
            input_ids=tokens,
            attention_mask=_masks(model, visible, positions),
            position_ids=positions,
            use_cache=True,
            **{cache_name(model): Cache(layers=list(layers))},
        )
    finally:
        handle.remove()
    return (output.logits, *(tensor for layer in layers for tensor in layer.tensors))


def cache_name(model: Any) -> str:
    """What a model of transformers, or its class, calls the argument for a cache: ``cache`` from version 5.24 on."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def attention_of(config: Any) -> str:
    """What transformers calls the attention that a model of a configuration is to have: PyTorch's operator, or, where
    the model knows none such, as those with sinks, the one that it spells out.
    """
    try:
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        return "sdpa"  # which nothing is made with
    return "sdpa" if kind._supports_sdpa else "eager"


def _masks(model: Any, visible: torch.Tensor, positions: torch.Tensor) -> Any:
    """What a model takes as its mask: for each kind of its layers, where some see a window of the text alone.

    Attention that is no operator of PyTorch's own adds the mask to its scores.
    """
    config = model.config
    window = getattr(config, "sliding_window", None)
    near = visible
    if window is not None and window < visible.shape[-1]:
        near = visible & (torch.arange(visible.shape[-1]) > positions[:, None, :, None] - window)
    kinds = {"full_attention": visible, "sliding_attention": near}
    if config._attn_implementation != "sdpa":
        least = torch.finfo(model.dtype).min
        kinds = {name: torch.where(mask, 0.0, least).to(model.dtype) for name, mask in kinds.items()}
    layers = set(getattr(config, "layer_types", None) or ())
    if layers > {"sliding_attention"} and near is not visible:
        return kinds
    return kinds["full_attention" if layers == {"full_attention"} else "sliding_attention"]


def cache_shapes(model: Any, length: int) -> list[tuple[int, ...]]:
    """The shapes [1, G, `length`, D] of the keys' and values' caches of each layer, from a run of one token."""
    cache: Any = Cache(layer_class_to_replicate=_RecordingLayer)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=True, **{cache_name(model): cache})
    return [(*tensor.shape[:2], length, tensor.shape[3]) for layer in cache.layers for tensor in layer.tensors]


class CacheLayer(CacheLayerMixin):
    """What transformers asks of a layer's cache, beyond the update.

    Attributes:
        tensors: What holds keys, then what holds values.
    """

    is_compileable = True
    is_sliding = False
    tensors: tuple[torch.Tensor, ...] = ()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the tensors are given, or come with the update."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what the mask covers."""
        return (int(self.tensors[0].shape[2]) if self.tensors else query_length), 0

    def get_seq_length(self) -> int:
        """Zero: the positions are given with each call."""
        return 0

    def get_max_length(self) -> int:
        """The length of the cache; -1 stands for none."""
        return int(self.tensors[0].shape[2]) if self.tensors else -1


class _RecordingLayer(CacheLayer):
    """Keeps what one run puts into it."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.tensors = (key_states, value_states)
        return key_states, value_states


class _FunctionalLayer(CacheLayer):
    """Makes new caches of the old ones; which of them may share memory is the compiler's to prove."""

    def __init__(self, held: tuple[torch.Tensor, ...], positions: torch.Tensor, form: RowForm) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors, self._positions, self._form = held, positions, form
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        form = self._form
        rows = (*form.pack(key_states), *form.pack(value_states))
        pairs = zip(self.tensors, rows, strict=True)
        self.tensors = tuple(form.put(cache, self._positions, new) for cache, new in pairs)
        return form.numbers(self.tensors[: form.tensors]), form.numbers(self.tensors[form.tensors :])
