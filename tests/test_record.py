"""`@frozen` records behave like frozen dataclasses."""

from collections.abc import Callable
from copy import copy
from dataclasses import FrozenInstanceError, astuple, dataclass, field, fields, replace
from typing import Any

import pytest

from headrace.record import frozen


@frozen
class Point:
    """A record with and without defaults."""

    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.x + self.y


@frozen
class Named(Point):
    """A record that inherits, and has a `__post_init__`."""

    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name.upper())


@frozen(eq=False, kw_only=True)
class Loose:
    """A keyword-only record that equals only itself."""

    a: int
    b: int = 1


@frozen
class Empty:
    """A record without fields."""


@dataclass(frozen=True)
class Standard:
    """A standard dataclass with the fields of `Twin`."""

    x: int
    y: str = "y"
    z: tuple[int, ...] = ()


@frozen
class Twin:
    """A record with the fields of `Standard`."""

    x: int
    y: str = "y"
    z: tuple[int, ...] = ()


class TestFrozen:
    def test_record_values_and_defaults(self) -> None:
        assert (
            (point := Point(1)).total == 3 and point.tags == [] and point.tags is not Point(1).tags
        )
        assert vars(Point(1, tags=["t"], y=5)) == {"x": 1, "y": 5, "tags": ["t"]}
        assert list(vars(Point(tags=[], y=1, x=0))) == ["x", "y", "tags"]
        assert Named(1, 2, [], "n").name == "N" and Loose(a=3).b == 1

    def test_record_equals_a_frozen_dataclass(self) -> None:
        for args, named in (((1,), {}), ((1, "a", (2,)), {}), ((), {"z": (3,), "x": 4})):
            standard, twin = Standard(*args, **named), Twin(*args, **named)
            assert repr(twin) == repr(standard).replace("Standard", "Twin") and hash(twin) == hash(
                standard
            )
            assert astuple(twin) == astuple(standard) and vars(twin) == vars(standard)
            assert [(one.name, one.default) for one in fields(twin)] == [
                (one.name, one.default) for one in fields(standard)
            ]

    def test_record_equality_and_hash(self) -> None:
        assert (
            Twin(1) == Twin(1) != Twin(2)
            and Twin(1) != Standard(1)
            and Empty() == Empty()
            and len({Empty(), Empty()}) == 1
        )
        assert Named(1) != Point(1) and len({Twin(1), Twin(1), Twin(1, "x")}) == 2
        loose = Loose(a=1)
        assert loose == loose != Loose(a=1) and len({loose, Loose(a=1)}) == 2

    def test_record_fields_are_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
            Point(1).x = 2  # type: ignore[misc]
        with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
            del Point(1).x

    def test_replaced_and_copied_records(self) -> None:
        named = Named(1, name="n")
        assert replace(named, x=7) == Named(7, 2, [], "n") and copy(named) == named

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Point(), "Point needs a value for 'x'"),
            (lambda: Point(1, 2, [], 4), "Point takes 3 positional arguments, but 4 were given"),
            (lambda: Point(1, z=3), "Point has no field 'z'"),
            (lambda: Point(1, x=3), "Point got two values for field 'x'"),
            (lambda: Loose(1), "Loose takes 0 positional arguments, but 1 were given"),
        ],
    )
    def test_wrong_record_arguments_raise(self, make: Callable[[], Any], message: str) -> None:
        with pytest.raises(TypeError, match=message):
            make()
