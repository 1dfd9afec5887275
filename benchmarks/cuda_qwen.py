"""Qwen2.5-1.5B for the CUDA benchmarks: the model, its compiled steps, and the same steps in PyTorch.

The model has its real shapes and seeded random weights in bfloat16. A cache is updated in place, by this project and by
PyTorch alike, and all of them may share one: a step writes the places of its own tokens before it reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

import npu_compiler
from benchmarks.decoder_sizes import QWEN
from npu_compiler.artifact.plan import ExecutionPlan
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.frontend.cached_decoder import CachedDecoder, cache_name

__all__ = ["Qwen", "Reference", "Step", "accuracy", "as_numpy", "bound", "logits", "make_model"]

_CACHE = cache_name(Qwen2ForCausalLM)  # looked up here, as PyTorch's compiler cannot


@dataclass(frozen=True)
class Step:
    """So many tokens at once, with a cache of a length: one function of the program."""

    tokens: int
    cache: int

    @property
    def function(self) -> str:
        return f"decode_{self.cache}" if self.tokens == 1 else f"prefill_{self.tokens}"


class Qwen:
    """The model on the GPU in bfloat16.

    Attributes:
        model: PyTorch's.
    """

    model: Any

    def __init__(self) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.model = make_model().to(torch.bfloat16).eval()

    def compiled(self, steps: Sequence[Step], folder: Path | None) -> CompiledProgram:
        """A program with a function for each step; extracted graphs are kept in a folder, if one is given."""
        irs: dict[str, Any] = {}
        on_host: Any = None
        for step in steps:
            kept = None if folder is None else folder / f"{step.function}.json"
            if kept is not None and kept.exists():
                irs[step.function] = json.loads(kept.read_text())
                continue
            on_host = on_host or CachedDecoder(make_model().to(torch.bfloat16).eval())
            irs[step.function] = npu_compiler.extract(on_host, self.inputs(step, "cpu"), model_name=step.function).ir
            if kept is not None:
                kept.write_text(json.dumps(irs[step.function]))
        return npu_compiler.compile(irs, target="cuda")

    def weights(self) -> dict[str, NDArray[Any]]:
        """Parameters and buffers by the names that the extracted graphs use."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {f"model.{name}": as_numpy(tensor.detach()) for name, tensor in named.items()}

    def inputs(self, step: Step, device: str = "cuda") -> dict[str, Any]:
        """Random tokens from the first position on, and a random cache."""
        config = self.model.config
        generator = torch.Generator(device).manual_seed(1)
        size = config.hidden_size // config.num_attention_heads
        shape = (1, config.num_key_value_heads, step.cache, size)
        caches = tuple(
            torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
            for _ in range(2 * config.num_hidden_layers)
        )
        tokens = torch.randint(config.vocab_size, (1, step.tokens), generator=generator, device=device)
        positions = torch.arange(step.tokens, device=device)
        last = {} if step.tokens == 1 else {"last": torch.tensor([step.tokens - 1], device=device)}
        return {"tokens": tokens, "positions": positions, "caches": caches, **last}

    def nbytes(self, step: Step, position: int) -> int:
        """What a step must read: all weights but the embedding of other tokens, and the cache up to its position."""
        config = self.model.config
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
        return int(2 * (parameters + 2 * config.num_hidden_layers * width * (position + step.tokens)))

    def flops(self, step: Step, position: int) -> int:
        """What a step must do: its products for each token, the last token's logits, attention to earlier tokens."""
        config = self.model.config
        embedding = config.vocab_size * config.hidden_size
        parameters = sum(parameter.numel() for parameter in self.model.parameters()) - embedding
        seen = step.tokens * position + step.tokens * (step.tokens + 1) // 2
        attention = 4 * config.num_hidden_layers * config.hidden_size * seen
        return int(2 * (parameters * step.tokens + embedding) + attention)


def make_model() -> Any:
    """PyTorch's model with seeded weights in float32, on the default device."""
    return Qwen2ForCausalLM(Qwen2Config(**QWEN | {"attn_implementation": "sdpa"}))


def as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor's numbers on the host, bfloat16 included."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    array: NDArray[Any] = tensor.cpu().numpy()
    return array


def bound(plan: ExecutionPlan, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs by the names that a plan uses."""
    named = {name: value for name, value in inputs.items() if name != "caches"}
    named |= {f"caches_{number}": cache for number, cache in enumerate(inputs["caches"])}
    return {spec.name: named[spec.name] for spec in plan.inputs}


class _Layer(CacheLayerMixin):
    """A layer's cache, updated in place. Several tokens are the first ones, and so attend to nothing but themselves."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values, self._positions = keys, values, positions
        self._cache = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def lazy_initialization(self, *states: torch.Tensor) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return int(self._cache[0].shape[2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for cache, states in zip(self._cache, (key_states, value_states), strict=True):
            cache.index_copy_(2, self._positions, states)
        return self._cache if len(self._positions) == 1 else (key_states, value_states)


def logits(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Logits of the last token, by PyTorch: one token with a mask over the cache, or the first ones with a causal mask.

    A causal mask that is not given as a tensor is what PyTorch has its fastest attention for.
    """
    caches, positions = inputs["caches"], inputs["positions"]
    layers: list[Any] = [_Layer(caches[i], caches[i + 1], positions) for i in range(0, len(caches), 2)]
    visible = torch.arange(caches[0].shape[2], device=positions.device) <= positions[:, None]
    output = model(
        input_ids=inputs["tokens"],
        attention_mask={"full_attention": visible[None, None] if len(positions) == 1 else None},
        position_ids=positions[None],
        use_cache=True,
        logits_to_keep=1,
        **{_CACHE: Cache(layers=layers)},
    )
    last: torch.Tensor = output.logits
    return last


class Reference:
    """The same model in float32."""

    def __init__(self, model: Any) -> None:
        self._wide = make_model().to("meta").to_empty(device="cuda")
        self._wide.load_state_dict(model.state_dict())
        self._wide.model.rotary_emb = model.model.rotary_emb
        self._wide.eval()

    def logits(self, inputs: Mapping[str, Any]) -> NDArray[np.float32]:
        """The last token's logits [V]; the inputs stay as they are."""
        with torch.inference_mode():
            caches = tuple(cache.float() for cache in inputs["caches"])
            wanted: NDArray[np.float32] = logits(self._wide, {**inputs, "caches": caches}).cpu().numpy().reshape(-1)
        del caches
        torch.cuda.empty_cache()
        return wanted


def accuracy(output: torch.Tensor, wanted: NDArray[np.float32]) -> dict[str, Any]:
    """How the logits of one token compare with the reference's [V]."""
    given = output.float().cpu().numpy().reshape(-1)
    best = [set(np.argsort(-values)[:5]) for values in (given, wanted)]
    return {
        "Pearson r": float(np.corrcoef(given.astype(np.float64), wanted.astype(np.float64))[0, 1]),
        "same argmax": bool(given.argmax() == wanted.argmax()),
        "of top-5": len(best[0] & best[1]),
        "largest error": float(np.abs(given - wanted).max()),
    }
