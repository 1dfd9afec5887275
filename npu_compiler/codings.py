"""How numbers are stored in few bits: the codes of a data type, as arithmetic that every target computes.

A coding is written once, over anything that has Python's operators and an `Arithmetic`: the tracer calls it with
expressions, which kernels evaluate in registers, and a test with numpy arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Arithmetic", "Coding", "PowerOfTwo", "SmallFloat"]

_BIAS, _MANTISSA = 127, 23  # of float32
_INFINITY = 0xFF << _MANTISSA
_MAGNITUDE = 0x7FFF_FFFF


class Arithmetic(Protocol):
    """What a coding calls beside operators; numbers are float32, codes and bits are int32."""

    def where(self, condition: Any, a: Any, b: Any) -> Any: ...

    def bits(self, number: Any) -> Any:
        """The bits of a float32."""

    def of_bits(self, bits: Any) -> Any:
        """The float32 of some bits."""


class Coding(ABC):
    """What the codes of a data type mean; a code is an unsigned integer of the type's size, held in an int32."""

    @abstractmethod
    def decode(self, code: Any, to: Arithmetic) -> Any:
        """The number, a float32, that a code from 0 on stands for."""

    @abstractmethod
    def encode(self, number: Any, to: Arithmetic) -> Any:
        """The code of the number that is nearest to a float32."""


@dataclass(frozen=True)
class SmallFloat(Coding):
    """A sign, an exponent and a mantissa, as IEEE 754 has them; rounded to nearest, ties to even.

    Attributes:
        exponent, mantissa: How many bits they have.
        has_infinity: Whether the highest exponent is that of infinity and NaN. Otherwise only the highest code of each
            sign is NaN (the types that end in "fn", for finite numbers, https://arxiv.org/abs/2209.05433), and what is
            too large, infinity too, becomes the largest number, as PyTorch has it from 2.13 on.
    """

    exponent: int
    mantissa: int
    has_infinity: bool

    @property
    def _sign(self) -> int:
        return 1 << (self.exponent + self.mantissa)

    @property
    def _beyond(self) -> int:
        """The first code without a sign that is no finite number."""
        return ((1 << self.exponent) - 1) << self.mantissa if self.has_infinity else self._sign - 1

    @property
    def _shift(self) -> int:
        """How far a mantissa is from its place in a float32."""
        return _MANTISSA - self.mantissa

    @property
    def _rebias(self) -> int:
        """What an exponent in the place of a float32's is short of being it."""
        return (_BIAS + 1 - (1 << (self.exponent - 1))) << _MANTISSA

    def decode(self, code: Any, to: Arithmetic) -> Any:
        size = code & (self._sign - 1)
        moved = size << self._shift
        first = self._rebias + (1 << _MANTISSA)  # bits of the least number that is not subnormal
        # A subnormal one gets that number's exponent, and so its leading bit, which is then taken off.
        subnormal = to.of_bits(moved + first) - to.of_bits(first)
        finite = to.where(size < (1 << self.mantissa), subnormal, to.of_bits(moved + self._rebias))
        special = to.of_bits(moved | _INFINITY)
        number = to.where(size < self._beyond, finite, special)
        return to.where(code < self._sign, number, -number)

    def encode(self, number: Any, to: Arithmetic) -> Any:
        bits = to.bits(number)
        size = bits & _MAGNITUDE
        first = self._rebias + (1 << _MANTISSA)
        # Where the last place of the sum is that of subnormal numbers, the sum rounds to it.
        aligned = first + (self._shift << _MANTISSA)
        subnormal = to.bits(to.of_bits(size) + to.of_bits(aligned)) - aligned
        odd = (size >> self._shift) & 1
        normal = (size - self._rebias + ((1 << (self._shift - 1)) - 1) + odd) >> self._shift
        code = to.where(size < first, subnormal, normal)
        largest = self._beyond if self.has_infinity else self._beyond - 1
        code = to.where(code < largest, code, largest)
        code = to.where(size > _INFINITY, self._sign - 1, code)
        return to.where(bits < 0, code + self._sign, code)


@dataclass(frozen=True)
class PowerOfTwo(Coding):
    """An exponent of eight bits alone, as scales of the MX formats have it: ``2^(code - 127)``; the last code is NaN.

    OCP Microscaling Formats (MX) Specification 1.0, section 5.4.1. As in PyTorch a number becomes the power that is
    nearest to its magnitude, the larger one halfway; infinity becomes NaN, and 0 the least power.
    """

    def decode(self, code: Any, to: Arithmetic) -> Any:
        number = to.of_bits(code << _MANTISSA)  # of the last code infinity
        number = to.where(code < 255, number, to.of_bits(_INFINITY | (1 << (_MANTISSA - 1))))
        return to.where(code < 1, to.of_bits(1 << (_MANTISSA - 1)), number)  # which is subnormal in float32

    def encode(self, number: Any, to: Arithmetic) -> Any:
        size = to.bits(number) & _MAGNITUDE
        half = 1 << (_MANTISSA - 1)
        code = (size + half) >> _MANTISSA
        code = to.where(size > half, code, size & 0)  # up to the least power, which is half of the first normal number
        return to.where(size < _INFINITY, code, 255)
