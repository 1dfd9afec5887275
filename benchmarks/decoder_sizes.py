"""The sizes of the decoders that are measured, as `transformers.Qwen2Config` takes them."""

from __future__ import annotations

from typing import Any

__all__ = ["QWEN", "QWEN_7B", "SMALL", "TINY"]


def _sizes(width: int, inner: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
    }


QWEN: dict[str, Any] = _sizes(1536, 8960, 28, 12, 151936) | {
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
"""Qwen2.5-1.5B."""

QWEN_7B: dict[str, Any] = QWEN | _sizes(3584, 18944, 28, 28, 152064)
QWEN_7B |= {"num_key_value_heads": 4, "tie_word_embeddings": False}
"""Qwen2.5-7B."""

SMALL: dict[str, Any] = QWEN | _sizes(512, 1408, 8, 8, 8192)
SMALL |= {"max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": None}
TINY: dict[str, Any] = QWEN | _sizes(128, 256, 2, 4, 1024)
