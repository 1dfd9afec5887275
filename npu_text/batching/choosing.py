"""Choosing tokens for the lanes of a batch on the device: what it keeps there, and the calls that choose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
    OF_TEXT,
    Feature,
    lane_row_ir,
    lane_rows_ir,
    lane_tokens_ir,
)
from npu_compiler.integers import ceil_div
from npu_compiler.tensor.layout import BufferSpec, dense
from npu_runtime.backend import BoundPlan, Recording
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_runtime.workspace import Workspace
from npu_text.batching.engine import Chosen, LaneSampling
from npu_text.batching.lane_sampling import LARGEST, SMALLEST, check_sampling
from npu_text.sampling import not_a_number

__all__ = ["BoundChoice", "LaneChooser", "LaneRow", "accepted"]

_SEEDS = 1 << 64


class LaneRow(NamedTuple):
    """For whom a row of logits chooses.

    Attributes:
        lane: Whose token.
        position: Of that token in the text.
        mask: uint32 [ceil(V / 32)], the tokens that may be chosen; None for all.
    """

    lane: int
    position: int
    mask: NDArray[np.uint32] | None = None


def accepted(tokens: Sequence[int], chosen: Sequence[Chosen]) -> tuple[Chosen, ...]:
    """What a step for several tokens adds to a text.

    The choice at a position depends on the text before it, and on the seed: a guessed token is right if, and only if,
    it is the one that is chosen there. So the text is what it is without guesses.

    Args:
        tokens: The last token, and a guess of those that follow.
        chosen: For each of them, what was chosen to follow.

    Returns:
        One choice, and one more for each guessed token that was right so far.
    """
    count = 1
    while count < len(tokens) and chosen[count - 1].token == tokens[count]:
        count += 1
    return tuple(chosen[:count])


@dataclass
class _Lane:
    """What is known of the text of a lane.

    Attributes:
        sampling: How its tokens are chosen.
        last: The token whose count the device does not have yet.
        counts: Of all tokens that it has, as the device keeps them.
    """

    sampling: LaneSampling = field(default_factory=LaneSampling)
    last: int = 0
    counts: Counter[int] = field(default_factory=Counter)

    @property
    def features(self) -> set[Feature]:
        sampling = self.sampling
        asked = {
            Feature.DRAWN: sampling.temperature > 0,
            Feature.BIAS: bool(sampling.logit_bias),
            Feature.PENALTIES: self.is_penalised,
            Feature.BEST: sampling.best is not None,
        }
        return {feature for feature, is_asked in asked.items() if is_asked}

    @property
    def is_penalised(self) -> bool:
        sampling = self.sampling
        return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0)


class LaneChooser:
    """Chooses the tokens of all lanes at once.

    What lanes ask for lies in memory that the device reads and the host writes; so do the results. Counts of tokens
    and biases, a row of the vocabulary for each lane, are on the device, from the first text on that has penalties or
    biases. (A bias is a dense row, because the pass that adds it also masks and penalises: a list of pairs would
    need a pass of its own over the logits, and a bound on their number.)
    """

    def __init__(self, device: Device, vocabulary: int, kind: str, lanes: int) -> None:
        """Prepares for texts; functions are compiled when they are first asked for.

        Args:
            device: Where logits are.
            vocabulary: How many tokens there are.
            kind: Data type of the logits.
            lanes: How many texts there are at once, at most.
        """
        self.device, self.vocabulary, self.lanes = device, vocabulary, lanes
        self._kind = kind
        self._lanes = [_Lane() for _ in range(lanes + 1)]  # the last one is nobody's: that of rows without a text
        self._memory: dict[str, NPUBuffer] = {}
        self._views: dict[str, NDArray[Any]] = {}
        self._executors: dict[tuple[object, ...], Executor] = {}
        self._calls: dict[tuple[object, ...], tuple[NPUBuffer, BoundChoice, Recording]] = {}
        self._workspace = Workspace(device.backend)  # calls come one after another
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
        if any(not 0 <= token < self.vocabulary for token in tokens):
            raise InputError(f"given a token beyond the vocabulary, expected 0 to {self.vocabulary - 1}")
        self._lanes[lane] = text = _Lane(sampling, tokens[-1] if tokens else 0)
        inverse = min(max(1 / sampling.temperature, SMALLEST), LARGEST) if sampling.temperature else 0.0
        seed = sampling.seed % _SEEDS
        penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        values: dict[str, object] = {
            "all_limits": (inverse, sampling.top_p, sampling.min_p),
            "all_top_k": min(sampling.top_k, self.vocabulary),
            "all_seeds": seed - _SEEDS if seed >= _SEEDS >> 1 else seed,
            "all_penalties": penalties,
        }
        for name, value in values.items():
            self._settings(name)[lane] = value
        if text.is_penalised:
            text.counts = Counter(dict.fromkeys(tokens, IN_PROMPT))
            self._write_row("counts", lane, text.counts)
        if sampling.logit_bias or "bias" in self._memory:
            self._write_row("bias", lane, sampling.logit_bias)

    def features(self, rows: Sequence[LaneRow]) -> frozenset[Feature]:
        """What a choice for these rows has to do."""
        found = {feature for lane in {row.lane for row in rows} for feature in self._lanes[lane].features}
        return frozenset(found | {Feature.MASK for row in rows if row.mask is not None})

    def bind(self, logits: NPUBuffer, features: Collection[Feature]) -> BoundChoice:
        """A choice from the logits in a buffer [..., V], for engines that run it right behind what makes them.

        Args:
            logits: Where they are, or will be.
            features: What it does; rows may ask for less.
        """
        asked = frozenset(features)
        executor = self._choice(logits.shape, asked)
        inputs, own, plans = {"logits": logits}, {}, []
        for spec in executor.plan.inputs:
            if spec.name in _TABLES:
                inputs[spec.name] = NPUBuffer(self.device, self._table(spec.name).data, spec)
            elif spec.name != "logits":
                inputs[spec.name] = NPUBuffer(self.device, self.device.backend.allocate(spec.nbytes), spec)
        if asked & _NEED_ROWS:
            rows = self._rows(prod(logits.shape[:-1]), asked)
            own = {spec.name: self._visible(spec) for spec in rows.plan.inputs if spec.name not in _SETTINGS}
            settings = {spec.name: self._memory[spec.name] for spec in rows.plan.inputs if self._is_setting(spec)}
            made = {spec.name: inputs[spec.name] for spec in rows.plan.outputs}
            plans.append(rows.bind({**own, **settings}, made))
        states = {output for output, _ in executor.plan.state}
        outputs = {spec.name: self._visible(spec) for spec in executor.plan.outputs if spec.name not in states}
        plans.append(executor.bind(inputs, outputs))
        return BoundChoice(self, plans, own, inputs.get("masks"), outputs)

    def choose(self, logits: NPUBuffer, rows: Sequence[LaneRow]) -> Callable[[], tuple[Chosen, ...]]:
        """Asks for the tokens of some rows of logits, the first ones of a buffer [..., V].

        Returns:
            Waits for them, in the order of rows. No two calls for one buffer are under way at once.

        Raises:
            InputError: As `BoundChoice.put`.
        """
        key = id(logits), self.features(rows)
        if key not in self._calls:
            bound = self.bind(logits, key[1])
            self._calls[key] = logits, bound, self.device.backend.record(bound.plans)
        _, bound, recording = self._calls[key]
        bound.put(rows)
        wait = recording.launch()

        def finish() -> tuple[Chosen, ...]:
            wait()
            return bound.read()

        return finish

    def _choice(self, shape: tuple[int, ...], features: frozenset[Feature]) -> Executor:
        return self._prepared((shape, features), partial(lane_tokens_ir, shape, self._kind, self.lanes + 1, features))

    def _rows(self, rows: int, features: frozenset[Feature]) -> Executor:
        asked = features & _NEED_ROWS
        return self._prepared((rows, asked), partial(lane_rows_ir, rows, self.lanes + 1, asked))

    def _prepared(self, key: tuple[object, ...], make: Callable[[], dict[str, Any]]) -> Executor:
        """What runs a function, which is made when it is first asked for."""
        with self._lock:
            if key not in self._executors:
                self._executors[key] = self._compiled(make())
            return self._executors[key]

    def _compiled(self, ir: dict[str, Any]) -> Executor:
        program = compile(ir, self.device.target, ir["compute_dtype"])
        return Executor(program, self.device, workspace=self._workspace)

    def _visible(self, spec: BufferSpec) -> NPUBuffer:
        return NPUBuffer(self.device, self.device.backend.allocate_visible(spec.nbytes), spec)

    def _is_setting(self, spec: BufferSpec) -> bool:
        """Whether an input is what lanes ask for; it then has memory."""
        if spec.name in _SETTINGS:
            self._settings(spec.name)
        return spec.name in _SETTINGS

    def _settings(self, name: str) -> NDArray[Any]:
        """What lanes ask for, where the device reads it."""
        if name not in self._views:
            shape, kind = _SETTINGS[name]
            self._memory[name] = buffer = self._visible(_dense(name, (self.lanes + 1, *shape), kind))
            self._views[name] = view = _writable(buffer)
            view[...] = 0
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
        executor = self._prepared((name,), partial(lane_row_ir, self.lanes + 1, self.vocabulary, kind))
        row = np.zeros((1, self.vocabulary), kind)
        row[0, list(content)] = list(content.values())
        spec = next(spec for spec in executor.plan.inputs if spec.name == "all")
        every = NPUBuffer(self.device, table.data, spec)
        executor.run({"all": every, "lane": np.array([lane]), "row": row})

    def _put(self, rows: Sequence[LaneRow], count: int, own: Mapping[str, NDArray[Any]]) -> None:
        """Writes what a call needs to know of its rows."""
        if not 0 < len(rows) <= count:
            raise InputError(f"given {len(rows)} rows for logits of {count}, expected 1 to so many")
        if any(not 0 <= row.lane < self.lanes for row in rows):
            raise InputError(f"given lanes {[row.lane for row in rows]}, expected 0 to {self.lanes - 1}")
        penalised = [row.lane for row in rows if self._lanes[row.lane].is_penalised]
        if len(set(penalised)) < len(penalised):
            raise InputError(
                "given several rows for a lane with penalties, expected one: what a guess would add to the counts is "
                "not known before it is checked"
            )
        if "rows" in own:
            own["rows"][: len(rows)] = [(row.lane, row.position) for row in rows]
            own["rows"][len(rows) :] = self.lanes, 0
        if "last" in own:
            texts = [self._lanes[row.lane] for row in rows] + [self._lanes[-1]] * (count - len(rows))
            own["last"][:] = [text.last for text in texts]
            own["last_counts"][:] = [text.counts[text.last] for text in texts]

    def _check_mask(self, mask: NDArray[np.uint32]) -> None:
        words = ceil_div(self.vocabulary, MASK_BITS)
        if mask.shape != (words,) or mask.dtype != np.uint32:
            raise InputError(f"given a mask {mask.dtype} {list(mask.shape)}, expected uint32 [{words}]")

    def _chosen(self, rows: Sequence[LaneRow], found: Mapping[str, NDArray[Any]]) -> tuple[Chosen, ...]:
        """The choices for rows, which join the counts of their texts."""
        chosen = []
        for number, row in enumerate(rows):
            text, token = self._lanes[row.lane], int(found["tokens"][number])
            if token < 0:
                raise not_a_number("no number")
            if text.is_penalised:
                text.last = token
                text.counts[token] += OF_TEXT
            best = text.sampling.best
            if best is None:
                chosen.append(Chosen(token))
                continue
            likeliest = found["best"][number, :best].tolist(), found["best_logprobs"][number, :best].tolist()
            chosen.append(Chosen(token, float(found["logprobs"][number]), tuple(zip(*likeliest, strict=True))))
        return tuple(chosen)


class BoundChoice:
    """A choice from the logits in one buffer. Calls of `put`, runs of the plan and `read` follow one another.

    Attributes:
        plans: To be run one after another, or recorded: the last one behind what makes the logits.
    """

    def __init__(
        self,
        chooser: LaneChooser,
        plans: Sequence[BoundPlan],
        own: Mapping[str, NPUBuffer],
        masks: NPUBuffer | None,
        outputs: Mapping[str, NPUBuffer],
    ) -> None:
        """Takes what `LaneChooser.bind` made.

        Args:
            chooser: Whose.
            plans: What brings to the device what `put` writes, and what chooses.
            own: What `put` writes for each call, where host and device see it.
            masks: int32 [R, W] on the device, where there are masks.
            outputs: Where host and device see them.
        """
        self.plans = plans
        self._chooser, self._masks = chooser, masks
        (self._count,) = outputs["tokens"].shape
        self._memory = own, outputs  # stays as long as the plans
        self._own = {name: _writable(buffer) for name, buffer in own.items()}
        self._found = {name: _readable(buffer) for name, buffer in outputs.items()}
        self._rows: Sequence[LaneRow] = ()
        self._masked = [True] * (masks.shape[0] if masks is not None else 0)  # rows that do not allow all tokens

    def put(self, rows: Sequence[LaneRow]) -> None:
        """Says for whom the first rows of the logits choose; what the others give is nobody's.

        Raises:
            InputError: More rows than logits, no such lane, a mask of another size, or several rows of a lane with
                penalties.
        """
        self._chooser._put(rows, self._count, self._own)
        if self._masks is None and any(row.mask is not None for row in rows):
            raise InputError("given a mask for a choice that was bound without masks")
        for row in rows:
            if row.mask is not None:
                self._chooser._check_mask(row.mask)
        self._rows = tuple(rows)
        for number, is_masked in enumerate(self._masked):
            mask = self._rows[number].mask if number < len(rows) else None
            if mask is not None or is_masked:
                self._write_mask(number, mask)

    def _write_mask(self, row: int, mask: NDArray[np.uint32] | None) -> None:
        """Writes the mask of a row, ahead of whatever is asked for next; None allows all tokens."""
        assert self._masks is not None
        size = self._masks.shape[1] * self._masks.dtype.size
        with self._masks.data.writing_part(row * size, size) as content:
            content.view(np.uint32)[...] = _ALL_ALLOWED if mask is None else mask
        self._masked[row] = mask is not None

    def read(self) -> tuple[Chosen, ...]:
        """What a run that has been waited for chose, in the order of the rows. To be called once for each run.

        Raises:
            DeviceError: The logits of a row are no numbers, or its mask allows none of its tokens.
        """
        return self._chooser._chosen(self._rows, self._found)


_ALL_ALLOWED = np.uint32(0xFFFFFFFF)
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


def _writable(buffer: NPUBuffer) -> NDArray[Any]:
    with buffer.data.writing() as content:
        return buffer.spec.layout.view(content.view(buffer.spec.dtype.numpy))


def _readable(buffer: NPUBuffer) -> NDArray[Any]:
    content = buffer.data.reading().view(buffer.spec.dtype.numpy)
    return buffer.spec.layout.view(content)
