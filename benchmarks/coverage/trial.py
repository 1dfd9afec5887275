"""One model through all stages: build, extract, partition, compile, run, compare with PyTorch in float32."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

import npu_compiler
from benchmarks.coverage.agreement import Agreement, agreement
from benchmarks.coverage.entry import Absent, Built, Entry
from benchmarks.coverage.seeding import seed_weights
from npu_compiler.partitioner import PartitionPlan
from npu_runtime import DAGExecutor, Device
from npu_runtime.device import device_kinds

__all__ = ["STAGES", "Request", "try_model"]

STAGES = ("extract", "partition", "compile", "run")
_SEED = 0
_ADDRESS = re.compile(r"0x[0-9a-f]{8,}|\b\d{12,}\b")
_LONGEST_MESSAGE = 300
_SILENT = 0.99  # a correlation below it, of a model that nothing refused, is a wrong answer until it is explained


@dataclass(frozen=True)
class Request:
    """What is asked of each model.

    Attributes:
        device: Name of a device; its target is compiled for.
        until: The last of `STAGES`.
        ir_folder: Where IRs are kept, so that a second pass needs no export unless it runs; None for nowhere.
    """

    device: str
    until: str
    ir_folder: Path | None = None

    @property
    def target(self) -> str:
        return device_kinds()[self.device.partition(":")[0]].target

    def wants(self, stage: str) -> bool:
        return STAGES.index(stage) <= STAGES.index(self.until)


def try_model(entry: Entry, request: Request) -> dict[str, Any]:
    """The model's record; a stage that fails ends it, with the error in it."""
    record: dict[str, Any] = {"name": entry.name, "kind": entry.kind, "status": "built", "seconds": {}}
    try:
        for stage in _stages(entry, request, record):
            record["status"] = stage
    except Absent as error:
        record |= {"status": "absent", "error": str(error)}
    except Exception as error:  # whatever it is, it belongs to this model alone
        record["error"] = {"type": type(error).__name__, "message": _first_lines(error)}
    return record


def _first_lines(error: Exception) -> str:
    """Its words without the addresses of objects, which are others in each run."""
    return _ADDRESS.sub("…", " ".join(str(error).split()))[:_LONGEST_MESSAGE]


def _stages(entry: Entry, request: Request, record: dict[str, Any]) -> Iterator[str]:
    """Yields the name of each stage that is done."""
    seconds: dict[str, float] = record["seconds"]
    kept = None if request.ir_folder is None else request.ir_folder / f"{entry.name.replace('/', '.')}.json"
    if kept is not None and kept.exists() and not request.wants("run"):
        ir, built, weights = json.loads(kept.read_text()), None, None
    else:
        with _timed(seconds, "build"):
            built = _build(entry, seeded=request.wants("run"))
        with _timed(seconds, "extract"):
            inputs = built.inputs
            extraction = npu_compiler.extract(built.module, inputs, model_name=entry.name.rpartition("/")[2])
        ir, weights = extraction.ir, extraction.weights
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(ir))
    record["nodes"] = len(ir["nodes"])
    yield "extract"
    if not request.wants("partition"):
        return
    with _timed(seconds, "partition"):
        plan = npu_compiler.partition(ir, target=request.target)
    record |= _division(plan)
    yield "partition"
    if not request.wants("compile"):
        return
    if not request.wants("run"):
        with _timed(seconds, "compile"):
            parts = [part for part in plan.partitions if part.on_device]
            programs = [npu_compiler.compile(part.ir, target=request.target) for part in parts]
        record["launches"] = sum(len(program.main.calls) for program in programs)
        yield "compile"
        return
    assert built is not None
    assert weights is not None
    with _timed(seconds, "compile"):
        executor = DAGExecutor(plan, Device(request.device))
        executor.load_weights(weights)
    record["launches"] = sum(len(part.plan.calls) for part in executor.main.executors.values())
    yield "compile"
    given = _named(plan, built.inputs)
    with _timed(seconds, "run"):
        outputs = executor.execute(given)
    found = [np.asarray(outputs[spec.name]) for spec in plan.outputs]
    record |= _compared(entry, built, found)
    yield "run"


@contextmanager
def _timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    started = perf_counter()
    try:
        yield
    finally:
        seconds[what] = round(perf_counter() - started, 2)


def _build(entry: Entry, *, seeded: bool) -> Built:
    """The model; with weights that show errors only where it is to run, since the other stages read no weight."""
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    built = entry.build()
    built.module.eval()
    if seeded:
        seed_weights(built.module, built.inputs)
    return built


def _division(plan: PartitionPlan) -> dict[str, Any]:
    on_device = [part for part in plan.partitions if part.on_device]
    return {
        "nodes": sum(len(part.nodes) for part in plan.partitions),
        "nodes_on_device": sum(len(part.nodes) for part in on_device),
        "partitions": len(plan.partitions),
        "partitions_on_device": len(on_device),
        "bytes_moved": plan.bytes_moved,
        "left": [
            {"op": cause.op, "reason": cause.reason, "nodes": len(cause.nodes), "with_followers": len(cause.all_nodes)}
            for cause in plan.ledger.causes
        ],
    }


def _named(plan: PartitionPlan, inputs: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    names = [spec.name for spec in plan.inputs]
    if isinstance(inputs, Mapping) and set(names) == set(inputs):
        return dict(inputs)
    given = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
    return dict(zip(names, given, strict=True))


def _called(module: torch.nn.Module, inputs: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        result = module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _compared(entry: Entry, built: Built, found: Sequence[np.ndarray[Any, Any]]) -> dict[str, Any]:
    wanted = _called(built.module, built.inputs)
    measured = agreement([tensor.numpy() for tensor in wanted], found)
    record: dict[str, Any] = {"r": round(measured.r, 6), "mismatched": measured.mismatched}
    if entry.classes and wanted:
        best = [array.astype(np.float32).argmax(-1) for array in (wanted[0].numpy(), found[0])]
        record["same_class"] = bool(np.array_equal(*best))
    if measured.r < _SILENT or measured.mismatched:
        record["r_of_export"] = round(_agreement_of_export(built, wanted).r, 6)
        half = _agreement_of_half(built, wanted)
        record |= {"r_of_half": round(half.r, 6), "mismatched_of_half": half.mismatched}
    return record


def _agreement_of_export(built: Built, wanted: Sequence[torch.Tensor]) -> Agreement:
    """How near PyTorch's own export of the model comes: some decide by being traced what they compute."""
    inputs = built.inputs
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    exported = torch.export.export(built.module, () if named else tuple(inputs), named).module()
    return agreement([tensor.numpy() for tensor in wanted], [each.numpy() for each in _called(exported, inputs)])


def _agreement_of_half(built: Built, wanted: Sequence[torch.Tensor]) -> Agreement:
    """How near PyTorch comes with weights and tensors in float16: what the data type alone costs."""
    half = built.module.half()

    def halved(value: torch.Tensor) -> torch.Tensor:
        return value.half() if value.is_floating_point() else value

    inputs = built.inputs
    given = {k: halved(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(map(halved, inputs))
    try:
        found = _called(half, given)
    except RuntimeError:  # an op that the CPU has not in float16
        return Agreement(float("nan"), 0)
    return agreement([tensor.numpy() for tensor in wanted], [tensor.float().numpy() for tensor in found])
