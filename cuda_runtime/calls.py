"""The calls of an executor, found again by the form of the inputs and where they lie."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np

from cuda_runtime.backend import CUDABackend
from cuda_runtime.call import Call
from cuda_runtime.device import CUDABuffer, Flag
from cuda_runtime.given import HOST, Given, span
from cuda_runtime.inputs import Copied, FromHost, InPlace, Input, Narrowed, Rearranged
from cuda_runtime.output_ring import OutputSet
from cuda_runtime.plan import CUDAPlan
from cuda_runtime.tensor import CUDATensor, checked_array, lies_as
from npu_compiler.artifact.memory import ALIGNMENT
from npu_compiler.artifact.plan import ExecutionPlan, Role
from npu_compiler.errors import InputError
from npu_compiler.tensor.layout import TOO_LARGE_REMEDY, BufferSpec
from npu_runtime.backend import DeviceBuffer
from npu_runtime.buffer import NPUBuffer
from npu_runtime.faults import FaultRecord
from npu_runtime.weight_loader import Weights
from npu_runtime.workspace import Workspace

__all__ = ["Calls"]

_MOST_CALLS = 16
_AT_ONCE = 4  # places that inputs are read at from their first run on
_REMEMBERED = 64  # further places, where they are read from their second run on

Key = tuple[Any, ...]


class Calls:
    """Two kinds: those that read inputs where they lie, for inputs that came from the same place before, and those
    that copy them first, for inputs that come from anywhere.

    Attributes:
        numbers: The number of the plan's buffer for each output that has memory of its own.
        states: For each input that is updated in place its place among the inputs, and its name.
        state_outputs: The output that such an input becomes.
        output_specs: Of all outputs.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        prepared: CUDAPlan,
        workspace: Workspace,
        device: CUDABackend,
        faults: FaultRecord,
        check_buffer: Callable[[str, object, BufferSpec], None],
        rounded: Collection[str],
    ) -> None:
        """Args:
        plan, prepared: The plan, and the same ready to run.
        workspace: Its intermediate tensors.
        device: The device.
        faults: What kernels write to where an index lies beyond its tensor.
        check_buffer: Raises InputError for a buffer that does not fit a spec; its first argument says which buffer.
        rounded: Inputs from the host in which too large a number becomes infinite, rather than being refused.
        """
        self._plan, self._prepared, self._workspace, self._cuda = plan, prepared, workspace, device
        self._faults, self._check_buffer, self._rounded = faults, check_buffer, rounded
        with device.active():
            self._overflow, self._ignored = Flag(device), Flag(device)
        named = {(buffer.role, buffer.name): i for i, buffer in enumerate(plan.buffers)}
        self._specs = {spec.name: spec for spec in plan.inputs}
        self._inputs = {name: named.get((Role.INPUT, name)) for name in self._specs}
        self.state_outputs = {source: output for output, source in plan.state}
        self.states = [(i, name) for i, name in enumerate(self._specs) if name in self.state_outputs]
        self.output_specs = {spec.name: spec for spec in plan.outputs}
        updated = {output for output, _ in plan.state}
        self.numbers = {name: named[Role.OUTPUT, name] for name in self.output_specs if name not in updated}
        self._calls: OrderedDict[Key, Call] = OrderedDict()
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._places = 0
        self._own: dict[str, CUDABuffer] = {}
        self._from_host: dict[Key, FromHost] = {}
        self._narrowed: dict[str, Narrowed] = {}
        self._spare: OutputSet | None = None
        self._latest: tuple[object, Call] | None = None

    def find(self, values: Sequence[Any], given: Sequence[Given], weights: Weights | None, waits: bool) -> Call:
        """The call for inputs, made when they are new.

        Args:
            values: The inputs.
            given: What is known of them.
            weights: The weights.
            waits: Whether the run is waited for before an array among the inputs may change.

        Raises:
            InputError: An input does not fit.
        """
        asked = given, id(weights), waits, self._workspace.version
        if self._latest is not None and asked == self._latest[0]:
            return self._latest[1]
        addresses = [each.address for each in given]
        narrow = waits and any(each.address == HOST and each.form[1] == np.float32 for each in given)
        forms = (id(weights), self._workspace.version, narrow, *[each.form for each in given])
        places = (*forms, *addresses)
        call = self._calls.get(places)
        if call is not None:
            self._latest = asked, call
            return call
        anywhere = not self._is_worth_a_call(places, given)
        key = forms if anywhere else places
        if key not in self._calls:
            made = self._made(values, given, weights, anywhere, narrow)
            if len(self._calls) == _MOST_CALLS:
                self._calls.popitem(last=False)
            self._calls[key] = made
        return self._calls[key]

    def _is_worth_a_call(self, places: Key, given: Sequence[Given]) -> bool:
        """Whether a graph is captured for these very places, because these inputs may well come from there again."""
        if self.states or all(each.address == HOST for each in given) or places in self._seen:
            return True
        self._seen[places] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        self._places += 1
        return self._places <= _AT_ONCE

    def spare(self, make: Callable[[], Mapping[str, CUDATensor]]) -> OutputSet:
        """Outputs that nobody is given, to be copied from."""
        if self._spare is None:
            self._spare = OutputSet("spare", make())
        return self._spare

    @property
    def overflow(self) -> Any:
        """What conversions of inputs set where a value is too large, see `Conversion.ask`."""
        return self._overflow.array

    def refusal(self) -> InputError | None:
        """What to say where an input was too large for the program's data type. All runs are over."""
        found = None
        for each in self._narrowed.values():
            error = each.refusal()  # every one of them, as this ends what it knows of the run
            found = found or error
        if self._overflow.taken():
            found = found or InputError(
                "given an input with values that its data type on the device does not hold: float16 holds up to 65504 "
                f"({TOO_LARGE_REMEDY}), integers have at most 32 bits"
            )
        return found

    def _made(
        self, values: Sequence[Any], given: Sequence[Given], weights: Weights | None, anywhere: bool, narrow: bool
    ) -> Call:
        self._check_states(values)
        inputs: list[tuple[int, int, Input]] = []
        arenas = self._workspace.arenas(self._plan)
        for place, (name, number) in enumerate(self._inputs.items()):
            taken = self._taken(self._specs[name], values[place], given[place], anywhere, narrow)
            if number is not None:  # else nothing reads it
                inputs.append((place, number, taken))
        held: Mapping[str, DeviceBuffer] = weights or {}
        pointers = [0] * len(self._plan.buffers)
        for number, buffer in enumerate(self._plan.buffers):
            if buffer.role is Role.ARENA:
                pointers[number] = cast(CUDABuffer, arenas[number]).pointer
            elif buffer.role is Role.WEIGHT:
                pointers[number] = cast(CUDABuffer, held[buffer.name]).pointer
            elif buffer.role is Role.FAULTS:
                pointers[number] = cast(CUDABuffer, self._faults.memory).pointer
        kept = weights, arenas, [value.spec for value in values if isinstance(value, NPUBuffer)]
        return Call(self._cuda, self._prepared, pointers, inputs, self.overflow, kept)

    def _check_states(self, values: Sequence[Any]) -> None:
        names, spans = list(self._specs), [span(value) for value in values]
        for number, source in self.states:
            for other, each in enumerate(spans):
                if other != number and each.nbytes and each.overlaps(spans[number]):
                    raise InputError(
                        f"input '{source}' is updated in place and shares memory with '{names[other]}'; give it its own"
                    )

    def _taken(self, spec: BufferSpec, value: Any, given: Given, anywhere: bool, narrow: bool) -> Input:
        """How an input is taken."""
        if isinstance(value, np.ndarray):
            return self._taken_from_host(spec, value, narrow)
        if isinstance(value, NPUBuffer):
            self._check_buffer(f"input '{spec.name}'", value, spec)
            lies = True
        else:
            array = checked_array(value, self._cuda, spec)
            lies = lies_as(array, spec)
        if spec.name in self.state_outputs or (lies and not anywhere and given.address % ALIGNMENT == 0):
            return InPlace(given.address)
        if anywhere or lies:
            return Copied(self._cuda, self._memory(spec), spec, self.overflow)
        return Rearranged(array, self._memory(spec), spec)

    def _taken_from_host(self, spec: BufferSpec, value: np.ndarray[Any, Any], narrow: bool) -> Input:
        spec.check(value)  # the form is the dtype and shape; values are looked at on the device
        key, memory, checked = (spec.name, value.dtype), self._memory(spec), spec.name not in self._rounded
        if narrow and Narrowed.serves(spec, value):
            if spec.name not in self._narrowed:
                self._narrowed[spec.name] = Narrowed(self._cuda, memory, spec, checked)
            return self._narrowed[spec.name]
        if key not in self._from_host:
            flag = None if checked else self._ignored.array
            self._from_host[key] = FromHost(self._cuda, memory, spec, value.dtype, flag)
        return self._from_host[key]

    def _memory(self, spec: BufferSpec) -> CUDABuffer:
        """Memory of the executor's own for an input."""
        if spec.name not in self._own:
            self._own[spec.name] = self._cuda.allocate(spec.nbytes)
        return self._own[spec.name]
