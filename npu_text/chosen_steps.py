"""Decode steps with the choice of the next token behind them, where the device does all of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from npu_compiler.graph.next_token import NO_NUMBER, next_token_ir
from npu_runtime.backend import Recording
from npu_runtime.buffer import NPUBuffer
from npu_text.language_model import TokenSequence
from npu_text.sampling import Sampler, not_a_number
from npu_text.step_functions import Tensor, device_buffer, visible, write_number

__all__ = ["ChosenSteps"]

_FED_BACK = ("tokens", "next_positions")


class ChosenSteps:
    """The steps of a sequence, for models that the device `updates_in_place`.

    Tokens and positions have two places each: a step reads one, and the choice behind it writes the other. The host
    reads tokens where both see them.
    """

    def __init__(self, sequence: TokenSequence, sampler: Sampler) -> None:
        """Makes steps ready for the caches of a sequence, which may still be empty."""
        model, draws = sequence.model, sampler.sampling.temperature > 0
        spec, device = model.spec, model.device
        self._sequence = sequence
        self._choice = model.beside(next_token_ir, spec.vocabulary, spec.dtype, spec.cache_length, draws)
        inputs = {each.name: each for each in self._choice.plan.inputs}
        outputs = {each.name: each for each in self._choice.plan.outputs}
        self._read, chosen = visible(device, inputs["chosen"])
        settings = {"limits": sampler.limits, "top_k": sampler.top_k, "seeds": sampler.seeds} if draws else {}
        self._settings = {"chosen": chosen} | {
            name: NPUBuffer.from_numpy(array, device, spec=inputs[name]) for name, array in settings.items()
        }
        self._fed = [{name: device_buffer(device, outputs[name]) for name in _FED_BACK} for _ in range(2)]
        self._turn = 0
        self._held: tuple[int, int] | None = None  # token and position that the next step takes, if they are known
        self._recorded_for: Sequence[Tensor] = ()
        self._caches: list[NPUBuffer] = []
        self._recordings: list[Recording] = []
        self._record()

    def chosen_from(self, logits: Tensor) -> int:
        """The token that follows the sequence, whose last token gave these logits.

        Raises:
            DeviceError: The logits are no numbers.
        """
        position = len(self._sequence.tokens) - 1
        self._choice.run({"logits": logits, "positions": np.array([position]), **self._settings})
        return self.chosen_after(position)

    def start(self, token: int) -> None:
        """Makes the next step take this token behind the sequence."""
        if self._sequence.caches is not self._recorded_for:
            self._record()
        position = len(self._sequence.tokens)
        if self._held != (token, position):
            for name, value in zip(_FED_BACK, (token, position), strict=True):
                write_number(self._fed[self._turn][name], value)
        self._held = None

    def launch(self) -> Callable[[], None]:
        """Asks for a step, and gives what waits for it."""
        return self._next().launch()

    def run(self, token: int) -> int:
        """Takes one more token of the sequence, and gives the one that follows it.

        Raises:
            InputError: The cache is full.
            DeviceError: The device failed, or gave logits that are no numbers.
        """
        position = len(self._sequence.tokens)
        self.start(token)
        self._sequence.append([token])
        self._next().replay(sync=True, stream=None)
        chosen = self.chosen_after(position)
        self._held = chosen, position + 1
        return chosen

    def chosen_after(self, position: int) -> int:
        """The token that a step which has run chose to follow the one at a position.

        Raises:
            DeviceError: The logits were no numbers.
        """
        token = int(self._read[position])
        if token == NO_NUMBER:
            raise not_a_number("no number")
        return token

    def _next(self) -> Recording:
        recording = self._recordings[self._turn]
        self._turn = 1 - self._turn
        return recording

    def _record(self) -> None:
        """Makes steps ready for the caches of the sequence, if they are not for these very ones."""
        caches = [cache for cache in self._sequence.caches if isinstance(cache, NPUBuffer)]
        if [cache.data for cache in caches] != [cache.data for cache in self._caches]:
            self._caches = caches
            self._recordings = [self._recorded(turn) for turn in range(2)]
        self._recorded_for = self._sequence.caches

    def _recorded(self, turn: int) -> Recording:
        """A step that reads the token and position of a turn, and the choice that writes those of the other."""
        model, given = self._sequence.model, self._fed[turn]
        positions = given["next_positions"]
        step, logits = model.bind_step(given["tokens"], positions, self._caches)
        inputs = {"logits": logits, "positions": positions, **self._settings}
        return model.device.backend.record([step, self._choice.bind(inputs, self._fed[1 - turn])])
