"""Qwen2.5-1.5B on a CUDA device, beside PyTorch in the same process on the same weights.

Run it as ``python -m benchmarks.cuda_llm``; ``--json`` writes the figures. The model has its real shapes and seeded
random weights in bfloat16. Outputs are compared with PyTorch in float32 before anything is timed. A time is the median
over replays, each between two events of the device. PyTorch runs in bfloat16 with a cache that is updated in place:
eager, eager captured in a CUDA graph, and torch.compile captured in one.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

import npu_compiler
from cuda_runtime import CUDAExecutor
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.torch_frontend.cached_decoder import CachedDecoder
from npu_runtime import Device, load_weights
from npu_runtime.weight_loader import Weights

_CONFIG: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attn_implementation": "sdpa",
}
_PEERS = ("eager", "captured", "compiled")
_WARM_UP = 10
_REPLAYS = 40


@dataclass(frozen=True)
class Workload:
    """A step of the model: so many tokens from a position on, with a cache of a length."""

    tokens: int
    cache: int
    position: int

    @property
    def function(self) -> str:
        return f"{'decode' if self.tokens == 1 else 'prefill'}_{self.cache if self.tokens == 1 else self.tokens}"

    def __str__(self) -> str:
        if self.tokens == 1:
            return f"decode {self.cache}, position {self.position}"
        return f"prefill {self.tokens}"


WORKLOADS = (
    Workload(1, 2048, 128),
    Workload(1, 2048, 2000),
    Workload(1, 32768, 128),
    Workload(1, 32768, 32000),
    Workload(128, 2048, 0),
    Workload(512, 2048, 0),
    Workload(2048, 2048, 0),
    Workload(8192, 8192, 0),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_llm", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workloads", nargs="+", type=int, metavar="N", help="their numbers, from 0; all by default")
    parser.add_argument("--peers", nargs="*", default=list(_PEERS), choices=_PEERS)
    parser.add_argument("--graphs", type=Path, metavar="FOLDER", help="where extracted graphs are kept between runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    workloads = WORKLOADS if args.workloads is None else [WORKLOADS[number] for number in args.workloads]
    device = Device("cuda")
    model = seeded_model()
    program = compiled(model, workloads, args.graphs)
    weights = load_weights(named_weights(model), program, device)
    results = [measure(workload, model, program, weights, device, args.peers) for workload in workloads]
    figures = {"machine": _machine(device), "memory bandwidth, GB/s": _bandwidth(), "results": results}
    _print(figures)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def seeded_model() -> Any:
    """The model on the GPU in bfloat16."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        return _model().to(torch.bfloat16).eval()


def _model() -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**_CONFIG))


def compiled(model: Any, workloads: Any, folder: Path | None) -> CompiledProgram:
    """A program with a function for each workload."""
    irs: dict[str, Any] = {}
    on_host: Any = None
    for workload in workloads:
        kept = None if folder is None else folder / f"{workload.function}.json"
        if kept is not None and kept.exists():
            irs[workload.function] = json.loads(kept.read_text())
        elif workload.function not in irs:
            on_host = on_host or CachedDecoder(_model().to(torch.bfloat16).eval())
            inputs = _inputs(workload, model.config, "cpu")
            irs[workload.function] = npu_compiler.extract(on_host, inputs, model_name=workload.function).ir
            if kept is not None:
                kept.write_text(json.dumps(irs[workload.function]))
    return npu_compiler.compile(irs, target="cuda")


def named_weights(model: Any) -> dict[str, NDArray[Any]]:
    """Parameters and buffers by the names that the extracted graphs use."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {f"model.{name}": _to_numpy(tensor.detach()) for name, tensor in named.items()}


def _to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    array: NDArray[Any] = tensor.cpu().numpy()
    return array


def _inputs(workload: Workload, config: Any, device: str) -> dict[str, Any]:
    """Random tokens, and a random cache, of which the places from the first token's on matter no more."""
    generator = torch.Generator(device).manual_seed(1)
    size = config.hidden_size // config.num_attention_heads
    shape = (1, config.num_key_value_heads, workload.cache, size)
    caches = tuple(
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        for _ in range(2 * config.num_hidden_layers)
    )
    tokens = torch.randint(config.vocab_size, (1, workload.tokens), generator=generator, device=device)
    positions = workload.position + torch.arange(workload.tokens, device=device)
    last = {} if workload.tokens == 1 else {"last": torch.tensor([workload.tokens - 1], device=device)}
    return {"tokens": tokens, "positions": positions, "caches": caches, **last}


def measure(
    workload: Workload, model: Any, program: CompiledProgram, weights: Weights, device: Device, peers: list[str]
) -> dict[str, Any]:
    """Checks and times one workload; times in milliseconds."""
    inputs = _inputs(workload, model.config, "cuda")
    wanted = _reference(model, inputs)
    executor = CUDAExecutor(program, device, workload.function)
    plan = program.functions[workload.function]
    given = executor.run(_bound(plan, inputs), weights)[plan.outputs[0].name].to_numpy().astype(np.float32).reshape(-1)
    launches = len(plan.calls)
    figures: dict[str, Any] = {"workload": str(workload), "launches": launches, **_accuracy(given, wanted)}
    figures["npu"] = _milliseconds(executor.replay, stream=executor.stream)
    if workload.tokens == 1:
        moved = _bytes_of_a_step(model, workload)
        figures["GB/s"] = moved / figures["npu"] / 1e6
    for peer in peers:
        replay, logits = _peer(peer, model, _inputs(workload, model.config, "cuda"))
        figures[f"{peer}, Pearson r"] = _accuracy(logits.float().cpu().numpy().reshape(-1), wanted)["Pearson r"]
        figures[peer] = _milliseconds(replay)
        torch.cuda.empty_cache()
    measured = [figures[peer] for peer in peers]
    if measured:
        figures["ratio to the best peer"] = figures["npu"] / min(measured)
    return figures


def _bytes_of_a_step(model: Any, workload: Workload) -> int:
    """What a decode step must read: all weights but the embedding of other tokens, and the cache up to its position."""
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    return int(2 * (parameters + 2 * config.num_hidden_layers * width * (workload.position + 1)))


def _bound(plan: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs by the names that the plan uses."""
    named = {name: value for name, value in inputs.items() if name != "caches"}
    named |= {f"caches_{number}": cache for number, cache in enumerate(inputs["caches"])}
    return {spec.name: named[spec.name] for spec in plan.inputs}


class _Layer(CacheLayerMixin):
    """A layer's cache, updated in place."""

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
        return self._cache


def _logits(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Logits of the last token."""
    caches, positions = inputs["caches"], inputs["positions"]
    layers: list[Any] = [_Layer(caches[i], caches[i + 1], positions) for i in range(0, len(caches), 2)]
    visible = torch.arange(caches[0].shape[2], device=positions.device) <= positions[:, None]
    output = model(
        input_ids=inputs["tokens"],
        attention_mask=visible[None, None],
        position_ids=positions[None],
        past_key_values=Cache(layers=layers),
        use_cache=True,
        logits_to_keep=1,
    )
    logits: torch.Tensor = output.logits
    return logits


def _reference(model: Any, inputs: Mapping[str, Any]) -> NDArray[Any]:
    """The logits in float32."""
    with torch.inference_mode():
        wide = _model().to("meta").to_empty(device="cuda")
        wide.load_state_dict(model.state_dict())
        wide.model.rotary_emb = model.model.rotary_emb
        caches = tuple(cache.float() for cache in inputs["caches"])
        logits = _logits(wide.eval(), {**inputs, "caches": caches}).cpu().numpy().reshape(-1)
    del wide, caches
    torch.cuda.empty_cache()
    wanted: NDArray[Any] = logits
    return wanted


def _accuracy(given: NDArray[Any], wanted: NDArray[Any]) -> dict[str, Any]:
    best = [set(np.argsort(-logits)[:5]) for logits in (given, wanted)]
    return {
        "Pearson r": float(np.corrcoef(given.astype(np.float64), wanted.astype(np.float64))[0, 1]),
        "same argmax": bool(given.argmax() == wanted.argmax()),
        "of top-5": len(best[0] & best[1]),
    }


def _peer(name: str, model: Any, inputs: Mapping[str, Any]) -> tuple[Callable[[], object], torch.Tensor]:
    """A way of PyTorch's to run the step: what runs it once more, and its logits."""
    call: Callable[[Any, Mapping[str, Any]], torch.Tensor] = _logits
    if name == "compiled":
        torch._dynamo.reset()
        call = torch.compile(_logits)

    def once() -> torch.Tensor:
        with torch.inference_mode():
            return call(model, inputs)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            logits = once()
    torch.cuda.current_stream().wait_stream(side)
    if name == "eager":
        return once, logits
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = once()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, logits


def _machine(device: Device) -> dict[str, str]:
    return {
        "device": device.backend.name,
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }


def _bandwidth() -> float:
    """What reading memory reaches, by a matrix-vector product over 8 GiB."""
    matrix = torch.randn(1 << 18, 1 << 14, dtype=torch.bfloat16, device="cuda")
    vector = torch.randn(1 << 14, dtype=torch.bfloat16, device="cuda")
    return matrix.nbytes / _milliseconds(lambda: matrix @ vector) / 1e6


def _milliseconds(replay: Callable[[], object], stream: int | None = None) -> float:
    """Median time of a replay on a stream, PyTorch's own when not given."""
    on = torch.cuda.current_stream() if stream is None else torch.cuda.ExternalStream(stream)
    for _ in range(_WARM_UP):
        replay()
    times = []
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(on)
        replay()
        end.record(on)
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(median(times))


def _print(figures: dict[str, Any]) -> None:
    table = Table(title=", ".join(figures["machine"].values()))
    rows = figures["results"]
    table.add_column(f"reading: {figures['memory bandwidth, GB/s']:.0f} GB/s")
    for row in rows:
        table.add_column(row["workload"], justify="right")
    for key in dict.fromkeys(key for row in rows for key in row if key != "workload"):
        table.add_row(key, *(_text(row.get(key, "")) for row in rows))
    Console(width=180).print(table)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6f}" if 0.99 < value < 1 else f"{value:.3f}"
    return str(value)


if __name__ == "__main__":
    main()
