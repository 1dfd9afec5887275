"""Generation in which the host chooses each token, and asks for the next step when it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from npu_compiler.graph.page_copies import staging_ir
from npu_compiler.graph.token_matrix import as_matrix
from npu_compiler.graph.token_rows import token_rows_ir
from npu_runtime.backend import DeviceBuffer
from npu_runtime.buffer import NPUBuffer
from npu_runtime.executor import Executor
from npu_text.language_model import LanguageModel, TokenSequence
from npu_text.sampling import Sampler
from npu_text.step_functions import Tensor, device_buffer, visible
from npu_text.token_rows import TokenRows

__all__ = ["decode_on_host"]

_GIVEN = (("tokens", (1, 1), "int64"), ("positions", (1,), "int64"))


def decode_on_host(sequence: TokenSequence, sampler: Sampler, limit: int) -> Callable[[Tensor], Iterator[int]]:
    """Chooses each token on the host, and runs the next step only when the token after it is asked for.

    Where the device does all of a step and updates caches in place, the step is one replay, from the token that the
    host writes to the logits that it reads, with what spares it a look at all of them.
    """
    step = _ReplayedStep(sequence, sampler).chosen_after if sequence.model.updates_in_place else None
    return partial(_tokens, step or partial(_chosen_after, sequence, sampler), sampler)


def _tokens(step: Callable[[int], int], sampler: Sampler, logits: Tensor) -> Iterator[int]:
    token = sampler.choose_from(logits)
    while True:
        yield token
        token = step(token)


def _chosen_after(sequence: TokenSequence, sampler: Sampler, token: int) -> int:
    return sampler.choose_from(sequence.advance([token]))


class _ReplayedStep:
    """The function for one token, from memory that the host writes to memory that it reads."""

    def __init__(self, sequence: TokenSequence, sampler: Sampler) -> None:
        model = self._model = sequence.model
        self._sequence, self._sampler = sequence, sampler
        self._staging = model.beside(staging_ir, _GIVEN)
        draws = sampler.sampling.temperature > 0
        self._reading = model.beside(token_rows_ir, model.spec.vocabulary, model.spec.dtype, draws)
        given = {spec.name: visible(model.device, spec) for spec in self._staging.plan.inputs}
        self._token, self._position = (given[name][0] for name, *_ in _GIVEN)
        self._given = {name: buffer for name, (_, buffer) in given.items()}
        self._there = {spec.name: device_buffer(model.device, spec) for spec in self._staging.plan.outputs}
        self._found = _FoundRows(sequence.model, self._reading)
        inverse = np.full(1, sampler.inverse_temperature, np.float32)
        self._settings = {"inverse_temperature": NPUBuffer.from_numpy(inverse, model.device)} if draws else {}
        self._recorded_for: Sequence[Tensor] = ()
        self._memory: list[DeviceBuffer] = []
        self._record()

    def chosen_after(self, token: int) -> int:
        """The token that follows one more token of the sequence."""
        sequence = self._sequence
        if sequence.caches is not self._recorded_for:
            self._record()
        self._token[...], self._position[...] = token, len(sequence.tokens)
        sequence.append([token])
        self._recording.replay(sync=True, stream=None)
        return self._sampler.choose_by_rows(self._found.rows(self._sampler.inverse_temperature))

    def _record(self) -> None:
        """Makes the step ready for the caches of the sequence, if it is not for their memory."""
        caches = [cache for cache in self._sequence.caches if isinstance(cache, NPUBuffer)]
        memory = [cache.data for cache in caches]
        if memory != self._memory:
            tokens, positions = (self._there[f"{name}_there"] for name, *_ in _GIVEN)
            step, logits = self._model.bind_step(tokens, positions, caches)
            staged = self._staging.bind(self._given, self._there)
            read = self._reading.bind({"logits": logits, **self._settings}, self._found.buffers)
            self._recording = self._model.device.backend.record([staged, step, read])
        self._recorded_for, self._memory = self._sequence.caches, memory


class _FoundRows:
    """What `token_rows_ir` gives, where the host reads it.

    Attributes:
        buffers: Of the function's outputs.
    """

    def __init__(self, model: LanguageModel, reading: Executor) -> None:
        specs, (rows, columns) = {spec.name: spec for spec in reading.plan.outputs}, as_matrix(model.spec.vocabulary)
        self._count, seen = model.spec.vocabulary, {"sums": np.zeros(rows, np.float32)}
        self.buffers: dict[str, NPUBuffer] = {}
        for name in specs.keys() & {"highest", "sums"}:
            view, self.buffers[name] = visible(model.device, specs[name])
            seen[name] = view.reshape(rows)
        self._highest, self._sums = seen["highest"], seen["sums"]
        kind = specs["all_logits"].dtype.numpy
        memory = model.device.backend.allocate_visible(rows * columns * kind.itemsize)  # the function leaves its end
        with memory.writing() as content:
            self._logits = content.view(kind).reshape(rows, columns)
        self._logits[...] = -np.inf
        self.buffers["all_logits"] = NPUBuffer(model.device, memory, specs["all_logits"])

    def rows(self, inverse: float) -> TokenRows:
        """As they are when a run has been waited for, until the next one."""
        return TokenRows(self._count, self._logits, self._highest, self._sums, inverse)
