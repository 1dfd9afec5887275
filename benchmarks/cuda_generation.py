"""Generation with Qwen2.5-1.5B on a CUDA device: time per token, time to the first result, device memory.

Run it as ``python -m benchmarks.cuda_generation``; ``--json`` writes the figures. The model has its real shapes and
seeded random weights in bfloat16, a cache of 2048 tokens and a prompt of 128. Everything is measured in processes of
their own, which know nothing of PyTorch; files are in the page cache and kernels compiled, as on every later start.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from npu_compiler.artifact.generation_spec import FILE_NAME, GenerationSpec, StepSpec

_PREFILL = (128, 512)
_PROMPT = 128
_NEW_TOKENS = 256
_REPLAYS = 40
_STARTS = 3
_CACHE = 2048
_WEIGHTS = "model.safetensors"
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8, "seed": 1},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
    "temperature 0.7, top-k 20, top-p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 1},
    "temperature 1.0, top-k 100, top-p 0.9": {"temperature": 1.0, "top_k": 100, "top_p": 0.9, "seed": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_generation", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--graphs", type=Path, metavar="FOLDER", help="where extracted graphs are kept between runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--measure", choices=list(_MEASURES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(_MEASURES[args.measure](args)))
        return
    with tempfile.TemporaryDirectory() as place:
        figures = {"machine": _measured("writing", place, args.graphs)}
        _measured("first_result", place)  # compiles kernels
        starts = [_measured("first_result", place) for _ in range(_STARTS)]
        figures["first result, s"] = {mark: median(start[mark] for start in starts) for mark in starts[0]}
        figures |= {what: _measured(what, place) for what in ("generation", "memory")}
    print(json.dumps(figures, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def _measured(what: str, folder: str, graphs: Path | None = None) -> dict[str, Any]:
    """Figures from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.cuda_generation", "--measure", what, "--folder", folder]
    command += [] if graphs is None else ["--graphs", str(graphs)]
    done = subprocess.run([*command, "--started", repr(time.time())], check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _write_model(args: argparse.Namespace) -> dict[str, str]:
    """Writes what `npu extract-llm` makes, with seeded weights, and gives what the machine is."""
    from safetensors.torch import save_file

    from benchmarks.cuda_qwen import Qwen, Step
    from benchmarks.cuda_timing import machine
    from npu_runtime import Device

    qwen, folder = Qwen(), args.folder
    steps = [Step(1, _CACHE), *(Step(length, _CACHE) for length in _PREFILL)]
    for step in steps:
        kept = None if args.graphs is None else args.graphs / f"{step.function}.json"
        if kept is not None and kept.exists():
            shutil.copyfile(kept, folder / kept.name)
    program = qwen.compiled(steps, folder)
    config = qwen.model.config
    head = config.hidden_size // config.num_attention_heads
    spec = GenerationSpec(
        model="Qwen2ForCausalLM",
        dtype="bfloat16",
        vocabulary=config.vocab_size,
        cache_length=_CACHE,
        cache_shapes=((1, config.num_key_value_heads, _CACHE, head),) * (2 * config.num_hidden_layers),
        stop_ids=(),
        weights=_WEIGHTS,
        functions={step.function: _step(folder, step.function, step.tokens) for step in steps},
    )
    (folder / FILE_NAME).write_text(json.dumps(spec.to_json()))
    named = {**dict(qwen.model.named_parameters()), **dict(qwen.model.named_buffers())}
    save_file({f"model.{name}": tensor.detach().contiguous() for name, tensor in named.items()}, folder / _WEIGHTS)
    program.save(folder / "model.cuda.npubin")
    return machine(Device("cuda"))


def _step(folder: Path, name: str, length: int) -> StepSpec:
    ir = json.loads((folder / f"{name}.json").read_text())
    inputs, outputs = ([tensor["name"] for tensor in ir[key]] for key in ("graph_inputs", "graph_outputs"))
    caches = tuple(zip([name for name in inputs if name.startswith("caches")], outputs[1:], strict=True))
    last = "" if length == 1 else "last"
    return StepSpec(f"{name}.json", length, "tokens", "positions", last, outputs[0], caches)


def _prompt(length: int) -> list[int]:
    return [(7 * number + 3) % 1000 for number in range(length)]


def _first_result(args: argparse.Namespace) -> dict[str, float]:
    """Seconds since the process was asked for: imports, device, program and weights, functions, first token."""
    started = args.started
    marks = {"interpreter": time.time() - started}
    from npu_runtime import Device, Generator

    marks["imports"] = time.time() - started
    device = Device("cuda")
    marks["device"] = time.time() - started
    generator = Generator(args.folder, device)
    marks["program and weights"] = time.time() - started
    generation = generator.generate(_prompt(_PROMPT), _NEW_TOKENS)
    marks["functions"] = time.time() - started
    next(generation)
    marks["first token"] = time.time() - started
    return marks


def _generation(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a token by the host's clock, with steps asked for ahead and one by one; of a step; and choices."""
    from npu_runtime import Device, Generator
    from npu_text.host_decoding import decode_on_host

    generator = Generator(args.folder, Device("cuda"))
    positions = range(_PROMPT, _PROMPT + _NEW_TOKENS, 32)
    figures: dict[str, Any] = {}
    steps = [_step_milliseconds(generator, position) for position in positions]
    for name, options in _KINDS.items():
        texts = []
        for way, decoding in (("one by one", decode_on_host), ("ahead", None)):
            generator._decoding = decoding
            times = []
            for _ in range(3):
                generation = generator.generate(_prompt(_PROMPT), _NEW_TOKENS, **options)
                texts.append([token.id for token in generation])
                times.append(1e3 * generation.timing.decode_seconds / (_NEW_TOKENS - 1))
            figures[f"{name}: {way}, ms a token"] = median(times)
        figures[f"{name}: equal tokens"] = all(text == texts[0] for text in texts)
    steps += [_step_milliseconds(generator, position) for position in positions]
    step = figures["decode step on the device, ms"] = sum(steps) / len(steps)
    for name in _KINDS:
        figures[f"{name}: ratio"] = figures[f"{name}: ahead, ms a token"] / step
        figures[f"{name}: one by one, us beyond the step"] = 1e3 * (figures[f"{name}: one by one, ms a token"] - step)
        figures |= _choice_microseconds(generator, name)
    return figures


def _choice_microseconds(generator: Any, name: str) -> dict[str, float]:
    """Median time until the host has the choice that follows a step of a model of which the CPU does a part."""
    from npu_text.sampling import Sampling
    from npu_text.token_choice import TokenChoice

    choice = TokenChoice(generator.model, Sampling(**_KINDS[name]))
    on_device = generator.model.begin().advance(_prompt(_PROMPT))
    figures = {}
    for place, logits in (("device", on_device), ("host", on_device.to_numpy())):
        times = []
        for position in range(_NEW_TOKENS):
            started = time.perf_counter()
            choice.choose(logits, position)
            times.append(1e6 * (time.perf_counter() - started))
        figures[f"{name}: choice from logits on the {place}, us"] = median(times)
    return figures


def _step_milliseconds(generator: Any, position: int) -> float:
    """Median time of a decode step by events of the device."""
    import cupy
    import numpy as np

    from cuda_runtime import CUDAExecutor
    from npu_runtime import NPUBuffer

    model = generator.model
    step, function = model.step(1)
    sequence = model.begin()
    executor = CUDAExecutor(model.functions.program, model.device, model._names[1])
    arrays = {step.tokens: np.array([[5]]), step.positions: np.array([position])}
    inputs = {
        name: NPUBuffer.from_numpy(array, model.device, spec=function.input_specs[name])
        for name, array in arrays.items()
    }
    inputs |= {name: cache for (name, _), cache in zip(step.caches, sequence.caches, strict=True)}
    executor.run(inputs, model.functions.weights)
    stream = model.device.backend.stream
    times = []
    for _ in range(_REPLAYS):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        executor.replay()
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end))
    return float(median(times))


def _memory(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes of device memory after a text was generated, and what they are; the context of CUDA is apart."""
    import cupy

    from npu_runtime import Device, Generator

    device = Device("cuda")
    runtime = cupy.cuda.runtime
    free, total = runtime.memGetInfo()
    context = total - free
    generator = Generator(args.folder, device)
    list(generator.generate(_prompt(sum(_PREFILL)), _NEW_TOKENS))
    used = total - runtime.memGetInfo()[0] - context
    model = generator.model
    caches = sum(2 * prod(shape) for shape in model.spec.cache_shapes)
    plans = [plan for plan in (model.step(length)[1].plan for length in model.lengths) if plan is not None]
    needed = {
        "weights": model.functions.weights.nbytes,  # type: ignore[attr-defined]
        "caches": caches,
        "peak of activations": max(plan.arena_bytes for plan in plans),
    }
    pool = cupy.get_default_memory_pool()
    return {
        **needed,
        "used": used,
        "beyond, share": used / sum(needed.values()) - 1,
        "context": context,
        "pool, in use": pool.used_bytes(),
        "pool, held": pool.total_bytes(),
    }


_MEASURES: dict[str, Callable[[argparse.Namespace], Mapping[str, Any]]] = {
    "writing": _write_model,
    "first_result": _first_result,
    "generation": _generation,
    "memory": _memory,
}


if __name__ == "__main__":
    main()
