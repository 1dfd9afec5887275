"""Architectures of transformers, built small from their configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.coverage.entry import Absent, Built, Entry
from benchmarks.coverage.transformers_table import ARCHITECTURES, Architecture
from npu_cli.extras import import_torchvision

__all__ = ["entries"]

_TOKENS, _PADDING = 16, 2
_SIDE, _FRAMES = 64, 4
_SAMPLES = 4000
_LARGE_PATCH = 8
_FIRST_ORDINARY_TOKEN = 3  # after padding, beginning and end

# What makes any configuration small. A configuration gets those that it has, of the type that it has them.
_SMALL: Mapping[str, Any] = {
    "vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embedding_size": 64,
    "word_embed_proj_dim": 64, "emb_dim": 64, "vocab_size_input": 256,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16,
    "intermediate_size": 128, "ffn_dim": 128, "d_ff": 128, "n_inner": 128, "hidden_dim": 128, "d_inner": 128,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_seq_len": 128,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "image_size": _SIDE, "patch_size": 16, "num_frames": _FRAMES, "projection_dim": 32,
    "num_queries": 10, "use_cache": False, "use_pretrained_backbone": False,
}  # fmt: skip


def entries() -> Iterator[Entry]:
    for architecture in ARCHITECTURES:
        yield Entry(f"transformers/{architecture.name}", architecture.kind, partial(_build, architecture))


def _build(architecture: Architecture) -> Built:
    import_torchvision()  # some models import it, and cannot where its operators do not fit this torch
    import transformers

    try:
        config_class = transformers.CONFIG_MAPPING[architecture.model_type]
        model_class = _model_class(transformers, config_class, architecture)
    except (KeyError, AttributeError) as error:
        raise Absent(f"transformers {transformers.__version__} has no '{architecture.name}': {error}") from error
    config = small_config(config_class, architecture.config)
    model = model_class._from_config(config)
    return Built(model, _INPUTS[architecture.inputs](architecture, config))


def _model_class(transformers: Any, config_class: Any, architecture: Architecture) -> Any:
    if architecture.head:
        return getattr(transformers, architecture.head)
    mapping = transformers.MODEL_MAPPING
    found = mapping[config_class]
    return found[0] if isinstance(found, (tuple, list)) else found


def small_config(config_class: Any, overrides: Mapping[str, Any], part: Any = None) -> Any:
    """A configuration with two layers of 64 channels, and so on, in all its parts; `overrides` has the last word.

    Args:
        config_class: Its class.
        overrides: What the architecture needs.
        part: What it is by default, as the part of another; its class's default when omitted.
    """
    default = config_class() if part is None else part
    own = default.to_dict()  # not what is computed from other fields
    given: dict[str, Any] = {} if part is None else dict(own)
    for name, value in _SMALL.items():
        if name == "patch_size" and type(own.get(name)) is int and own[name] < _LARGE_PATCH:
            continue  # a model that divides the image step by step
        if name in own and (type(own[name]) is type(value) or (own[name] is None and name.endswith("token_id"))):
            given[name] = value
    for name in getattr(config_class, "sub_configs", {}):
        inner = getattr(default, name, None)
        if inner is not None and "backbone" not in name and isinstance(overrides.get(name, {}), Mapping):
            given[name] = small_config(type(inner), overrides.get(name, {}), inner).to_dict()
    plain = {name: value for name, value in overrides.items() if name not in given or not isinstance(value, Mapping)}
    return config_class(**{**given, **plain})


def _tokens(config: Any, count: int = _TOKENS) -> torch.Tensor:
    vocabulary = getattr(config.get_text_config(), "vocab_size", 256) or 256
    return torch.randint(_FIRST_ORDINARY_TOKEN, min(vocabulary, 256), (1, count))


def _padding(count: int = _TOKENS) -> torch.Tensor:
    return (torch.arange(count) < count - _PADDING).long()[None]


def _text(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(config), "attention_mask": _padding()}


def _tokens_alone(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(config)}


def _two_texts(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(config), "attention_mask": _padding(), "decoder_input_ids": _tokens(config, 8)}


def _image(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, *(architecture.shape or (3, _SIDE, _SIDE)))}


def _video(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, *(architecture.shape or (_FRAMES, 3, _SIDE, _SIDE)))}


def _image_and_text(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    return _text(architecture, config) | _image(architecture, config)


def _document(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    corners = torch.randint(0, 60, (1, _TOKENS, 2))
    sizes = torch.randint(1, 60, (1, _TOKENS, 2))
    return _text(architecture, config) | {"bbox": torch.cat([corners, corners + sizes], -1)}


def _wave(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(1, *(architecture.shape or (_SAMPLES,)))}


def _features(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(1, *architecture.shape)}


def _features_and_text(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    return _features(architecture, config) | {"decoder_input_ids": _tokens(config, 8)}


def _wave_and_text(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    return _wave(architecture, config) | {"decoder_input_ids": _tokens(config, 8)}


def _past_values(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    return {"past_values": torch.randn(1, *architecture.shape)}


def _spectrogram(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    return {"spectrogram": torch.randn(1, *architecture.shape)}


_INPUTS: Mapping[str, Callable[[Architecture, Any], dict[str, torch.Tensor]]] = {
    "text": _text,
    "tokens": _tokens_alone,
    "two texts": _two_texts,
    "image": _image,
    "video": _video,
    "image and text": _image_and_text,
    "document": _document,
    "wave": _wave,
    "features": _features,
    "features and text": _features_and_text,
    "wave and text": _wave_and_text,
    "past values": _past_values,
    "spectrogram": _spectrogram,
}
