"""A choice from the logits in one buffer, for whatever lanes have their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_compiler.graph.lane_tokens import OF_TEXT, Feature
from npu_runtime.backend import BoundPlan
from npu_runtime.buffer import NPUBuffer
from npu_text.batching.engine import Chosen, LaneSampling
from npu_text.sampling import not_a_number
from npu_text.step_functions import writable

__all__ = ["BoundChoice", "LaneGroup", "LaneText"]

_ALL_ALLOWED = 0xFF  # of each byte of a mask


@dataclass
class LaneText:
    """What is known of the text of a lane.

    Attributes:
        sampling: How its tokens are chosen.
        last: The token whose count the device does not have yet.
        counts: Of all tokens that it has, as the device keeps them.
    """

    sampling: LaneSampling = field(default_factory=LaneSampling)
    last: int = 0
    counts: Counter[int] = field(default_factory=Counter)

    @cached_property
    def features(self) -> frozenset[Feature]:
        """What its choice has to do, masks aside."""
        sampling = self.sampling
        asked = {
            Feature.DRAWN: sampling.temperature > 0,
            Feature.BIAS: bool(sampling.logit_bias),
            Feature.PENALTIES: self.is_penalised,
            Feature.BEST: sampling.best is not None,
        }
        return frozenset(feature for feature, is_asked in asked.items() if is_asked)

    @cached_property
    def is_penalised(self) -> bool:
        """Whether it has penalties."""
        return self.sampling.is_penalised


class LaneGroup:
    """Lanes that choose together, in the order of their rows, and what they ask for.

    Attributes:
        lanes: int64 [R], which; not to be changed.
        nobody: int64, what stands for nobody among them.
        penalised: Places of those with penalties, with their texts.
        told: Places of those that ask for log-probabilities, each with how many of the likeliest tokens.
    """

    def __init__(self, lanes: NDArray[np.int64], texts: Sequence[LaneText], nobody: int) -> None:
        """For `LaneChooser.group`.

        Raises:
            InputError: Several rows are of a lane with penalties.
        """
        self.lanes, self.nobody = lanes, nobody
        self.penalised = [(place, text) for place, text in enumerate(texts) if text.is_penalised]
        if len({id(text) for _, text in self.penalised}) < len(self.penalised):
            raise InputError(
                "given several rows for a lane with penalties, expected one: what a guess would add to the counts is "
                "not known before it is checked"
            )
        self.told = [(place, text.sampling.best) for place, text in enumerate(texts) if text.sampling.best is not None]
        self._features = frozenset[Feature]().union(*{text.features for text in texts})
        self._masked_features = self._features | {Feature.MASK}

    def features(self, masked: bool) -> frozenset[Feature]:
        """What their choice has to do, with masks for some of them or without."""
        return self._masked_features if masked else self._features


class BoundChoice:
    """A choice from the logits in one buffer. `put`, `masks` where there are some, a run and `read` take turns.

    Attributes:
        plans: To be run one after another, or recorded: the last one behind what makes the logits.
    """

    def __init__(
        self,
        plans: Sequence[BoundPlan],
        own: Mapping[str, NPUBuffer],
        masks: NPUBuffer | None,
        outputs: Mapping[str, NPUBuffer],
        nobody: int,
    ) -> None:
        """Takes what `LaneChooser.bind` made.

        Args:
            plans: What brings to the device what `put` writes, and what chooses.
            own: What `put` writes for each call, where host and device see it.
            masks: int32 [R, W] on the device, where there are masks.
            outputs: Where host and device see them.
            nobody: The lane that is nobody's.
        """
        self.plans = plans
        self._masks = masks
        self._memory = own, outputs  # stays as long as the plans
        self._own = {name: writable(buffer) for name, buffer in own.items()}
        if "rows" in self._own:
            self._own["rows"][:] = nobody, 0
        self._found = {name: _readable(buffer) for name, buffer in outputs.items()}
        self._nobody = nobody
        self._group: LaneGroup | None = None
        self._used = 0  # rows of the last call
        if masks is not None:  # rows that are nobody's keep it, or the mask of somebody
            with masks.data.writing() as content:
                content[:] = _ALL_ALLOWED

    def put(self, group: LaneGroup, positions: NDArray[np.int64]) -> None:
        """Says for whom the first rows of the logits choose; what the others give is nobody's.

        Args:
            group: For whom.
            positions: int64 [R], of the tokens that are chosen, in their texts.

        Raises:
            InputError: No rows, or more than logits.
        """
        count, most = len(group.lanes), len(self._found["tokens"])
        if not 0 < count <= most:
            raise InputError(f"given {count} rows for logits of {most}, expected 1 to so many")
        rows = self._own.get("rows")
        if rows is not None:
            rows[:count, 0], rows[:count, 1] = group.lanes, positions
            if count < self._used:
                rows[count : self._used] = self._nobody, 0
        if "last" in self._own:
            last, counts = self._own["last"], self._own["last_counts"]
            last[:], counts[:] = 0, 0
            for place, text in group.penalised:
                last[place], counts[place] = text.last, text.counts[text.last]
        self._group, self._used = group, count

    @contextmanager
    def masks(self) -> Iterator[NDArray[np.uint32]]:
        """The masks of all rows of this call, uint32 [R, W], which allow all tokens at first.

        The device has them when the block ends, ahead of what it is asked for next and behind what it was asked for.

        Raises:
            InputError: The choice was bound without masks.
        """
        if self._masks is None:
            raise InputError("given a mask for a choice that was bound without masks")
        words = self._masks.shape[1]
        with self._masks.data.writing_part(0, self._used * words * self._masks.dtype.size) as content:
            content[:] = _ALL_ALLOWED
            yield content.view(np.uint32).reshape(self._used, words)

    def read(self) -> tuple[NDArray[np.int64], dict[int, Chosen]]:
        """What a run that has been waited for chose; to be called once for each run, as tokens are counted.

        Returns:
            The tokens of the rows, int64 [R]; and for places that asked for log-probabilities the tokens with them.

        Raises:
            DeviceError: The logits of a row are no numbers, or its mask allows none of its tokens.
        """
        group = self._group
        assert group is not None
        tokens = self._found["tokens"][: self._used].copy()
        if tokens.min() < 0 and (group.lanes[tokens < 0] < group.nobody).any():
            raise not_a_number()
        for place, text in group.penalised:
            text.last = int(tokens[place])
            text.counts[text.last] += OF_TEXT
        return tokens, {place: self._told(place, int(tokens[place]), best) for place, best in group.told}

    def _told(self, place: int, token: int, best: int) -> Chosen:
        likeliest = self._found["best"][place, :best].tolist(), self._found["best_logprobs"][place, :best].tolist()
        return Chosen(token, float(self._found["logprobs"][place]), tuple(zip(*likeliest, strict=True)))


def _readable(buffer: NPUBuffer) -> NDArray[Any]:
    content = buffer.data.reading().view(buffer.spec.dtype.numpy)
    return buffer.spec.layout.view(content)
