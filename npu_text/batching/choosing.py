"""Choosing tokens for the lanes of a batch on the device: what it keeps there, and the calls that choose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from npu_compiler.compiler import compile
from npu_compiler.dtypes import dtype
from npu_compiler.errors import InputError
from npu_compiler.graph.lane_tokens import (
    IN_PROMPT,
    MASK_BITS,
    Feature,
    lane_row_ir,
    lane_rows_ir,
    lane_tokens_ir,
)
from npu_compiler.integers import ceil_div
from npu_compiler.tensor.layout import BufferSpec, dense
from npu_runtime.backend import DeviceBuffer, Recording
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_runtime.workspace import Workspace
from npu_text.batching.bound_choice import BoundChoice, LaneGroup, LaneText
from npu_text.batching.engine import Chosen, LaneSampling
from npu_text.batching.lane_sampling import check_sampling
from npu_text.sampling import inverse_temperature, signed_seed
from npu_text.step_functions import device_buffer, visible

__all__ = ["LaneChooser", "LaneRow", "accepted"]


class LaneRow(NamedTuple):
    """For whom a row of logits chooses.

    Attributes:
        lane: Whose token; as many as there are lanes stands for nobody.
        position: Of that token in the text.
        mask: uint32 [ceil(V / 32)], the tokens that may be chosen; None for all.
    """

    lane: int
    position: int
    mask: NDArray[np.uint32] | None = None


def accepted(tokens: Sequence[int], chosen: Sequence[int]) -> int:
    """How many tokens a step for several tokens adds to a text.

    The choice at a position depends on the text before it, and on the seed: a guessed token is right if, and only if,
    it is the one that is chosen there. So the text is what it is without guesses.

    Args:
        tokens: The last token, and a guess of those that follow.
        chosen: For each of them, what was chosen to follow.

    Returns:
        One, and one more for each guessed token that was right so far.
    """
    count = 1
    while count < len(tokens) and chosen[count - 1] == tokens[count]:
        count += 1
    return count


class LaneChooser:
    """Chooses the tokens of all lanes at once.

    What lanes ask for lies in memory that the device reads and the host writes; so do the results. Counts of tokens
    and biases, a row of the vocabulary for each lane, are on the device, from the first text on that has penalties or
    biases. (A bias is a dense row, because the pass that adds it also masks and penalises: a list of pairs would
    need a pass of its own over the logits, and a bound on their number.)

    Attributes:
        device, vocabulary, kind, lanes: As they were given.
    """

    def __init__(self, device: Device, vocabulary: int, kind: str, lanes: int) -> None:
        """Prepares for texts; functions are compiled when they are first asked for.

        Args:
            device: Where logits are, there or on siblings.
            vocabulary: How many tokens there are.
            kind: Data type of the logits.
            lanes: How many texts there are at once, at most.
        """
        self.device, self.vocabulary, self.lanes = device, vocabulary, lanes
        self.kind = kind
        self._lanes = [LaneText() for _ in range(lanes + 1)]  # the last one is nobody's: that of rows without a text
        self._memory: dict[str, NPUBuffer] = {}
        self._views: dict[str, NDArray[Any]] = {}
        self._executors: dict[tuple[object, ...], Executor] = {}
        self._calls: dict[tuple[object, ...], tuple[NPUBuffer, BoundChoice, Recording]] = {}
        self._workspaces: dict[Device, Workspace] = {}  # calls of one device come one after another
        self._lock = Lock()

    def begin(self, lane: int, sampling: LaneSampling, tokens: Sequence[int]) -> None:
        """A text takes a lane.

        Args:
            lane: Which; nothing that was asked for with it is still running.
            sampling: How its tokens are chosen.
            tokens: Of the prompt, as penalties count them.

        Raises:
            InputError: As `check_sampling` does; or there is no such lane or token.
        """
        check_sampling(sampling, self.vocabulary)
        if not 0 <= lane < self.lanes:
            raise InputError(f"given lane {lane}, expected 0 to {self.lanes - 1}")
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            raise InputError(f"given a token beyond the vocabulary, expected 0 to {self.vocabulary - 1}")
        self._lanes[lane] = text = LaneText(sampling, tokens[-1] if tokens else 0)
        penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        values: dict[str, object] = {
            "all_limits": (inverse_temperature(sampling.temperature), sampling.top_p, sampling.min_p),
            "all_top_k": min(sampling.top_k, self.vocabulary),
            "all_seeds": signed_seed(sampling.seed),
            "all_penalties": penalties,
        }
        for name, value in values.items():
            self._settings(name)[lane] = value
        if text.is_penalised:
            text.counts = Counter(dict.fromkeys(tokens, IN_PROMPT))
            self._write_row("counts", lane, text.counts)
        if sampling.logit_bias or "bias" in self._memory:
            self._write_row("bias", lane, sampling.logit_bias)

    def group(self, lanes: NDArray[np.int64]) -> LaneGroup:
        """What some lanes ask for together, int64 [R], for as many rows of logits; until one of them begins again.

        A number as large as there are lanes stands for nobody.

        Raises:
            InputError: There is no such lane; or several rows are of a lane with penalties.
        """
        if len(lanes) and not 0 <= lanes.min() <= lanes.max() <= self.lanes:
            raise InputError(f"given lanes {lanes.tolist()}, expected 0 to {self.lanes - 1}")
        return LaneGroup(lanes, [self._lanes[lane] for lane in lanes.tolist()], self.lanes)

    def bind(self, logits: NPUBuffer, features: Collection[Feature], tokens: DeviceBuffer | None = None) -> BoundChoice:
        """A choice from the logits in a buffer [..., V], for engines that run it right behind what makes them, there.

        Args:
            logits: Where they are, or will be.
            features: What it does; rows may ask for less.
            tokens: Visible memory for the tokens of all rows, int64 [R] or more; None for memory of its own.
        """
        asked = frozenset(features)
        device = logits.device
        executor = self._choice(device, logits.shape, asked)
        inputs, own, plans = {"logits": logits}, {}, []
        for spec in executor.plan.inputs:
            if spec.name in _TABLES:
                inputs[spec.name] = NPUBuffer(device, self._table(spec.name).data, spec)
            elif spec.name != "logits":
                inputs[spec.name] = device_buffer(device, spec)
        if asked & _NEED_ROWS:
            rows = self._rows(device, prod(logits.shape[:-1]), asked)
            own = {spec.name: visible(self.device, spec)[1] for spec in rows.plan.inputs if spec.name not in _SETTINGS}
            settings = {spec.name: self._memory[spec.name] for spec in rows.plan.inputs if self._is_setting(spec)}
            made = {spec.name: inputs[spec.name] for spec in rows.plan.outputs}
            plans.append(rows.bind({**own, **settings}, made))
        states = {output for output, _ in executor.plan.state}
        outputs = {
            spec.name: NPUBuffer(self.device, tokens, spec)
            if spec.name == "tokens" and tokens
            else visible(self.device, spec)[1]
            for spec in executor.plan.outputs
            if spec.name not in states
        }
        plans.append(executor.bind(inputs, outputs))
        return BoundChoice(plans, own, inputs.get("masks"), outputs, self.lanes)

    def choose(self, logits: NPUBuffer, rows: Sequence[LaneRow]) -> Callable[[], tuple[Chosen, ...]]:
        """Asks for the tokens of some rows of logits, the first ones of a buffer [..., V].

        Returns:
            Waits for them, in the order of rows. No two calls for one buffer are under way at once.

        Raises:
            InputError: As `group` and `BoundChoice.put`; or a mask of another size.
        """
        words = ceil_div(self.vocabulary, MASK_BITS)
        masks = {place: row.mask for place, row in enumerate(rows) if row.mask is not None}
        for mask in masks.values():
            if mask.shape != (words,) or mask.dtype != np.uint32:
                raise InputError(f"given a mask {mask.dtype} {list(mask.shape)}, expected uint32 [{words}]")
        group = self.group(np.array([row.lane for row in rows], np.int64))
        key = id(logits), group.features(bool(masks))
        if key not in self._calls:
            bound = self.bind(logits, key[1])
            self._calls[key] = logits, bound, logits.device.backend.record(bound.plans)
        _, bound, recording = self._calls[key]
        bound.put(group, np.array([row.position for row in rows]))
        if masks:
            with bound.masks() as content:
                for place, mask in masks.items():
                    content[place] = mask
        wait = recording.launch()

        def finish() -> tuple[Chosen, ...]:
            wait()
            tokens, told = bound.read()
            return tuple(told.get(place) or Chosen(token) for place, token in enumerate(tokens.tolist()))

        return finish

    def _choice(self, device: Device, shape: tuple[int, ...], features: frozenset[Feature]) -> Executor:
        make = partial(lane_tokens_ir, shape, self.kind, self.lanes + 1, features)
        return self._prepared(device, (shape, features), make)

    def _rows(self, device: Device, rows: int, features: frozenset[Feature]) -> Executor:
        asked = features & _NEED_ROWS
        return self._prepared(device, (rows, asked), partial(lane_rows_ir, rows, self.lanes + 1, asked))

    def _prepared(self, device: Device, key: tuple[object, ...], make: Callable[[], dict[str, Any]]) -> Executor:
        """What runs a function on a device, which is made when it is first asked for."""
        with self._lock:
            if (device, *key) not in self._executors:
                self._executors[device, *key] = self._compiled(device, make())
            return self._executors[device, *key]

    def _compiled(self, device: Device, ir: dict[str, Any]) -> Executor:
        program = compile(ir, device.target, ir["compute_dtype"])
        workspace = self._workspaces.setdefault(device, Workspace(device.backend))
        return Executor(program, device, workspace=workspace)

    def _is_setting(self, spec: BufferSpec) -> bool:
        """Whether an input is what lanes ask for; it then has memory."""
        if spec.name in _SETTINGS:
            self._settings(spec.name)
        return spec.name in _SETTINGS

    def _settings(self, name: str) -> NDArray[Any]:
        """What lanes ask for, where the device reads it."""
        if name not in self._views:
            shape, kind = _SETTINGS[name]
            spec = _dense(name, (self.lanes + 1, *shape), kind)
            self._views[name], self._memory[name] = visible(self.device, spec)
            self._views[name][...] = 0
        return self._views[name]

    def _table(self, name: str) -> NPUBuffer:
        """A row of the vocabulary for each lane, all zeros at first."""
        if name not in self._memory:
            spec = _dense(name, (self.lanes + 1, self.vocabulary), _TABLES[name])
            data = self.device.backend.allocate(spec.nbytes)
            self.device.backend.clear(data)
            self._memory[name] = NPUBuffer(self.device, data, spec)
        return self._memory[name]

    def _write_row(self, name: str, lane: int, content: Mapping[int, float]) -> None:
        table, kind = self._table(name), _TABLES[name]
        executor = self._prepared(self.device, (name,), partial(lane_row_ir, self.lanes + 1, self.vocabulary, kind))
        row = np.zeros((1, self.vocabulary), kind)
        row[0, list(content)] = list(content.values())
        spec = next(spec for spec in executor.plan.inputs if spec.name == "all")
        every = NPUBuffer(self.device, table.data, spec)
        executor.run({"all": every, "lane": np.array([lane]), "row": row})


_SETTINGS: dict[str, tuple[tuple[int, ...], str]] = {
    "all_limits": ((3,), "float32"),
    "all_top_k": ((), "int64"),
    "all_seeds": ((), "int64"),
    "all_penalties": ((3,), "float32"),
}
_TABLES = {"counts": "int32", "bias": "float32"}
_NEED_ROWS = frozenset((Feature.DRAWN, Feature.BIAS, Feature.PENALTIES))


def _dense(name: str, shape: tuple[int, ...], kind: str) -> BufferSpec:
    found = dtype(kind)
    return BufferSpec(name, found, found, dense(shape))
