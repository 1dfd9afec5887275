"""What a choice of the compiler may depend on of the device that will run its program, and where such facts are kept.

A target keeps one JSON file for each device that it knows. Its sections tell where a number comes from:

- ``description``: the device that the numbers are of.
- ``datasheet``: what the vendor publishes; names are fields of `DeviceModel`.
- ``estimated``: the same kind of facts where the vendor publishes none: reported by others, or derived.
- ``instructions``: what kernels may use that not all devices of the target have, by names that the target gives.
- ``fitted``: constants of families of kernels, fitted to times that were measured ``on`` a device.
- ``assumed``: constants of families of kernels that nobody measured on this device.
- ``like``: another device, whose constants are taken for families without any here, brought to this one in proportion
  to what a field says it scales with (see `scaling`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, ClassVar, Self, TypeVar, cast, get_args, get_origin, get_type_hints

from npu_compiler.errors import CompileError

__all__ = ["GENERIC", "DeviceModel", "DeviceModels", "FamilyConstants", "Launches", "scaling"]

Constants = TypeVar("Constants")
_SCALES = "scales"


def scaling(attribute: str) -> Any:
    """A field of a class of constants that is in proportion to an attribute of the `DeviceModel`.

    Rates in bytes a clock scale with ``memory_a_clock`` or ``cache_a_clock``, multiply-adds with ``core_products``.
    """
    return field(metadata={_SCALES: attribute})


@dataclass(frozen=True, eq=False)
class DeviceModel:
    """A device, for the compiler. A core is a multiprocessor of an NVIDIA GPU, or a core of an Apple GPU.

    Attributes:
        name: What users call it, such as ``sm_80``.
        description: The device that the numbers are of.
        cores: How many there are.
        clock_mhz: The highest clock; clocks of a cost are those of this clock.
        memory_gbs, cache_gbs: What device memory, and the last cache ahead of it, can deliver, in GB a second.
        shared_bytes: Shared or threadgroup memory that a block may have.
        core_shared_bytes: Shared memory of a core.
        core_registers: Registers of 32 bits of a core.
        core_threads: Threads that a core can hold.
        core_products: 16-bit multiply-adds of a core a clock, by instructions that every device of the target has.
        instructions: What kernels may use that not every device of the target has.
        estimated: Names of the fields above that no datasheet gives.
        families: Constants of families of kernels, as read.
        like: Where the constants of other families are taken from.
    """

    name: str
    description: str = ""
    cores: int = 1
    clock_mhz: int = 1000
    memory_gbs: float = 1.0
    cache_gbs: float = 1.0
    shared_bytes: int = 1 << 15
    core_shared_bytes: int = 1 << 15
    core_registers: int = 1 << 16
    core_threads: int = 1 << 10
    core_products: int = 1
    instructions: frozenset[str] = frozenset()
    estimated: frozenset[str] = frozenset()
    families: Mapping[str, Any] = field(default_factory=dict, repr=False)
    like: DeviceModel | None = field(default=None, repr=False)
    _known: dict[tuple[str, type], Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def memory_a_clock(self) -> float:
        """Bytes that device memory delivers a clock."""
        return self.memory_gbs * 1000 / self.clock_mhz

    @property
    def cache_a_clock(self) -> float:
        """Bytes that the last cache delivers a clock."""
        return self.cache_gbs * 1000 / self.clock_mhz

    @property
    def products_a_microsecond(self) -> float:
        """16-bit multiply-adds of all cores a microsecond."""
        return self.cores * self.core_products * self.clock_mhz

    def microseconds(self, clocks: float) -> float:
        """The time that so many clocks take."""
        return clocks / self.clock_mhz

    def constants(self, family: str, kind: type[Constants]) -> Constants:
        """The constants of a family of kernels.

        Args:
            family: Its name in the data files.
            kind: A frozen dataclass, whose fields are those of the section: numbers, tuples, or dataclasses again.

        Raises:
            CompileError: Neither this device nor one that it is like has them, or they are not what `kind` says.
        """
        found = self._known.get((family, kind))
        if found is None:
            if family in self.families:
                found = _decoded(kind, self.families[family], f"the device '{self.name}', '{family}'")
            elif self.like is not None:
                found = _scaled(self.like.constants(family, kind), self, self.like)
            else:
                raise CompileError(f"the device '{self.name}' has no constants of '{family}', and is like no other")
            self._known[family, kind] = found
        return cast(Constants, found)


class FamilyConstants:
    """Constants of a family of kernels: a frozen dataclass whose fields are those of the family's section.

    Attributes:
        family: Its name in the data files, which a subclass is given as an argument.
    """

    family: ClassVar[str]

    def __init_subclass__(cls, family: str) -> None:
        cls.family = family

    @classmethod
    def of(cls, device: DeviceModel) -> Self:
        """Those of a device.

        Raises:
            CompileError: As `DeviceModel.constants`.
        """
        return device.constants(cls.family, cls)


@dataclass(frozen=True)
class Launches(FamilyConstants, family="launches"):
    """What launches are worth.

    Attributes:
        flops: Arithmetic of a large product that takes as long as one more small launch.
        elements: Results of an elementwise kernel that fills the device by itself.
    """

    flops: int = scaling("products_a_microsecond")
    elements: int = scaling("cores")


GENERIC = DeviceModel("generic")
"""For targets that do not tell devices apart."""


@dataclass(frozen=True)
class DeviceModels:
    """The devices that a target knows: the JSON files of a package.

    Attributes:
        package: Name of the package.
        default: The device that programs are compiled for where nobody says.
    """

    package: str
    default: str

    @property
    def names(self) -> tuple[str, ...]:
        """What the devices are called, sorted."""
        found = (path.name for path in _folder(self.package).iterdir())
        return tuple(sorted(name.removesuffix(".json") for name in found if name.endswith(".json")))

    def named(self, name: str | None, target: str) -> DeviceModel:
        """The device of a name, or the default; one object for each.

        Args:
            name: What it is called.
            target: Whose devices they are, for the error.

        Raises:
            CompileError: There is no such device.
        """
        if name is not None and (not isinstance(name, str) or name not in self.names):
            raise CompileError(
                f"given the device {name!r:.60}, the target '{target}' knows {', '.join(self.names)}; leave device out "
                f"for {self.default}"
            )
        return _read(self.package, name or self.default)


_FACTS = {each.name for each in fields(DeviceModel) if each.type in ("int", "float")}
_SECTIONS = {"description", "datasheet", "estimated", "instructions", "fitted", "assumed", "like"}


def _folder(package: str) -> Traversable:
    return files(package)


@cache
def _read(package: str, name: str) -> DeviceModel:
    data = json.loads(_folder(package).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    datasheet, estimated = data.get("datasheet", {}), data.get("estimated", {})
    unknown = data.keys() - _SECTIONS | (datasheet.keys() | estimated.keys()) - _FACTS
    if unknown:
        raise CompileError(f"the data of the device '{name}' have {', '.join(sorted(unknown))}, which means nothing")
    measured = {family: constants for family, constants in data.get("fitted", {}).items() if family != "on"}
    return DeviceModel(
        name=name,
        description=data["description"],
        **datasheet,
        **estimated,
        instructions=frozenset(data.get("instructions", ())),
        estimated=frozenset(estimated),
        families={**measured, **data.get("assumed", {})},
        like=_read(package, data["like"]) if "like" in data else None,
    )


def _decoded(kind: Any, value: Any, where: str) -> Any:
    """A value of JSON as a number, a tuple, a mapping or a dataclass."""
    if is_dataclass(kind):
        return _instance(kind, value, where)
    origin = get_origin(kind)
    if origin is tuple and isinstance(value, Sequence):
        return tuple(_decoded(get_args(kind)[0], item, where) for item in value)
    if origin is Mapping and isinstance(value, Mapping):
        of_keys, of_values = get_args(kind)
        return {of_keys(key): _decoded(of_values, item, where) for key, item in value.items()}
    expected = (int, float) if kind is float else kind
    if not isinstance(expected, type | tuple) or not isinstance(value, expected):
        raise CompileError(f"{where}: given {value!r:.40}, expected {kind}")
    return value


def _instance(kind: Any, value: Any, where: str) -> Any:
    hints, needed = _fields_of(kind)
    given = set(value) if isinstance(value, Mapping) else set()
    if not needed <= given <= hints.keys():
        raise CompileError(f"{where}: given {sorted(given)}, expected {sorted(needed)} of {kind.__name__}")
    return kind(**{name: _decoded(hints[name], item, f"{where}, '{name}'") for name, item in value.items()})


@cache
def _fields_of(kind: type) -> tuple[dict[str, Any], frozenset[str]]:
    """The types of a dataclass's fields by name, and the fields that have no default."""
    hints = get_type_hints(kind)
    needed = frozenset(each.name for each in fields(kind) if each.default is MISSING)
    return {each.name: hints[each.name] for each in fields(kind)}, needed


def _scaled(constants: Any, own: DeviceModel, other: DeviceModel) -> Any:
    """Constants of another device in proportion to what their fields scale with."""
    if isinstance(constants, tuple):
        return tuple(_scaled(item, own, other) for item in constants)
    if not is_dataclass(constants):
        return constants
    values = {}
    for each in fields(constants):
        value, attribute = getattr(constants, each.name), each.metadata.get(_SCALES)
        if attribute is None:
            values[each.name] = _scaled(value, own, other)
            continue
        scaled = value * getattr(own, attribute) / getattr(other, attribute)
        values[each.name] = max(1, round(scaled)) if isinstance(value, int) else scaled
    made: Any = constants
    return replace(made, **values)
