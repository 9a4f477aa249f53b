"""Typed values of a model file, which is not trusted."""

import math
import reprlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.errors import FormatError, UnsupportedModelError

_MAX_NUMBER = 1e30
"""Products of larger constants overflow."""


class Fields(Mapping[str, Any]):
    """Values by key; None counts as missing.

    Raises FormatError for another type, or a missing value without default.
    """

    where: str

    def integer(self, key: str, default: int | None = None) -> int:
        value: int = self._get(key, default, int, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default, (int, float), "a number")
        if not math.isfinite(value) or abs(value) > _MAX_NUMBER:
            raise FormatError(f"{self.where}: {key} is {value}")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value < 1 / _MAX_NUMBER:
            raise FormatError(
                f"{self.where}: {self.own_name(key)} is {value}, but must be positive"
            )
        return value

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value: bool = self._get(key, default, bool, "true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        value: str = self._get(key, default, str, "a string")
        return value

    def number_list(self, key: str) -> tuple[float, ...]:
        """A list of numbers; empty if missing."""
        values = self._get(key, [], list, "a list of numbers")
        if not all(
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and abs(value) <= _MAX_NUMBER
            for value in values
        ):
            raise FormatError(f"{self.where}: {key} must be a list of numbers")
        return tuple(map(float, values))

    def section(self, key: str) -> "JsonFields":
        """The fields of an object; empty if missing."""
        return JsonFields(self._get(key, {}, dict, "an object"), f"{self.where}: {key}")

    def require_neutral(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise UnsupportedModelError for a value that is not in `neutral`."""
        for key, values in neutral.items():
            value = self.get(key)
            if value is not None and (isinstance(value, np.ndarray) or value not in values):
                raise self.unsupported(key)

    def unsupported(self, key: str, why: str = "") -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.where}: {self.own_name(key)} = {shown(self.get(key))} is not supported{why}"
        )

    def own_name(self, key: str) -> str:
        return key

    def _get(self, key: str, default: Any, kind: type | tuple[type, ...], description: str) -> Any:
        value = self.get(key)
        key = self.own_name(key)
        if value is None:
            if default is None:
                raise FormatError(f"{self.where}: {key} is missing")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise FormatError(
                f"{self.where}: {key} must be {description}, found {shown(value)[:40]}"
            )
        if isinstance(value, int) and abs(value) >= 2**63:
            raise FormatError(f"{self.where}: {key} is out of range")
        return value


class JsonFields(Fields):
    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        other_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._values = values
        self._other_names = other_names
        self.where = where

    def named(self, other_names: Mapping[str, str]) -> "JsonFields":
        return JsonFields(self._values, self.where, other_names)

    def own_name(self, key: str) -> str:
        name = self._other_names.get(key, key)
        return name if name in self._values else key

    def __getitem__(self, key: str) -> Any:
        return self._values[self.own_name(key)]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.own_name(key) in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def shown(value: Any) -> str:
    return (value if isinstance(value, str) else reprlib.repr(value))[:80]
