"""Frozen records: `dataclass(frozen=True)` with methods that all records share.

The standard decorator compiles six methods for each class, which takes a millisecond of every
start: a tenth of a second for all that an engine is made of. A record has the same fields,
keywords, comparison and errors, and `dataclasses.replace`, `fields` and the like take it for what
it is.
"""

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from typing import Any, NoReturn, TypeVar, dataclass_transform, overload

_T = TypeVar("_T")


@overload
def frozen(cls: type[_T], /) -> type[_T]: ...


@overload
def frozen(*, eq: bool = True, kw_only: bool = False) -> Callable[[type[_T]], type[_T]]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(
    cls: type[_T] | None = None, /, *, eq: bool = True, kw_only: bool = False
) -> type[_T] | Callable[[type[_T]], type[_T]]:
    """Make a frozen record of a class with annotated fields. Without `eq` it is equal to itself
    alone.
    """
    if cls is None:
        return lambda cls: _frozen(cls, eq, kw_only)
    return _frozen(cls, eq, kw_only)


def _frozen(cls: type[_T], eq: bool, kw_only: bool) -> type[_T]:
    made: Any = dataclass(cls, init=False, repr=False, eq=False, kw_only=kw_only)
    made.__init__ = _initialiser(made)
    made.__repr__, made.__setattr__, made.__delattr__ = _show, _refuse_to_set, _refuse_to_delete
    if eq:
        made.__eq__, made.__hash__ = _comparison(made)
    return cls


def _initialiser(cls: Any) -> Callable[..., None]:
    """`__init__`, which puts the fields into the instance in their order."""
    in_order = [one.name for one in fields(cls) if not one.kw_only]
    names = in_order + [one.name for one in fields(cls) if one.kw_only]
    defaults = {one.name: one.default for one in fields(cls) if one.default is not MISSING}
    factories = {
        one.name: one.default_factory for one in fields(cls) if one.default_factory is not MISSING
    }
    has_post_init = hasattr(cls, "__post_init__")

    def __init__(self: Any, /, *args: Any, **named: Any) -> None:
        count = len(args)
        if count > len(in_order):
            raise TypeError(
                f"{cls.__name__} takes {len(in_order)} positional arguments, and {count} were given"
            )
        values = dict(zip(in_order, args, strict=False))
        for name in names[count:]:
            if name in named:
                values[name] = named.pop(name)
            elif name in defaults:
                values[name] = defaults[name]
            elif name in factories:
                values[name] = factories[name]()
            else:
                raise TypeError(f"{cls.__name__} needs a value for {name!r}")
        if named:
            raise TypeError(f"{cls.__name__} has no further field {next(iter(named))!r}")
        self.__dict__.update(values)
        if has_post_init:
            self.__post_init__()

    return __init__


def _comparison(cls: Any) -> tuple[Callable[[Any, object], bool], Callable[[Any], int]]:
    """`__eq__` and `__hash__`, by all fields."""
    names = [one.name for one in fields(cls)]
    values: Callable[[Any], object] = attrgetter(*names) if names else lambda self: ()

    def __eq__(self: Any, other: object) -> bool:
        return values(self) == values(other) if type(self) is type(other) else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __eq__, __hash__


def _show(self: Any) -> str:
    return f"{type(self).__qualname__}({', '.join(f'{one.name}={getattr(self, one.name)!r}' for one in fields(self))})"


def _refuse_to_set(self: object, name: str, value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: object, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")
