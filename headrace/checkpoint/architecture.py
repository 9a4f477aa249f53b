"""Which family the files of a model belong to, and what to say where there is none: what is
missing, and which known one is nearest.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from headrace.errors import HeadraceError, UnsupportedModelError
from headrace.model.family import Layout

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_SHOWN = 4

_Layout = TypeVar("_Layout", bound=Layout)


def layout_of(
    name: str,
    layouts: Iterable[_Layout | None],
    where: str,
    tensor_names: Callable[[], Iterable[str]],
) -> _Layout:
    """The layout of the files that call their architecture `name`.

    Raises UnsupportedModelError, which names what is nearest by the names of the tensors.
    """
    known = []
    for layout in filter(None, layouts):
        if name in layout.architectures:
            return layout
        known.append(layout)
    raise _unknown(name, known, where, tensor_names)


def _unknown(
    name: str, layouts: Sequence[Layout], where: str, tensor_names: Callable[[], Iterable[str]]
) -> UnsupportedModelError:
    try:
        kinds = Counter(_NUMBER.sub("{}", tensor) for tensor in tensor_names())
    except HeadraceError:  # a folder without weights, or with broken ones
        kinds = Counter()
    known = ", ".join(sorted({layout.architectures[0] for layout in layouts}))
    error = f"{where}: architecture {name[:80]!r} is not known"
    if not kinds:
        return UnsupportedModelError(f"{error}; known are: {known}")
    nearest = max(
        layouts, key=lambda layout: sum(n for kind, n in kinds.items() if kind in _places(layout))
    )
    strange = [
        kind
        for kind in kinds
        if kind not in _places(nearest) and not kind.endswith(nearest.ignored)
    ]
    if len(strange) == len(kinds):
        return UnsupportedModelError(
            f"{error}, and no tensor of it is called as in any that is: {known}"
        )
    more = f" and {len(strange) - _MOST_SHOWN} more" if len(strange) > _MOST_SHOWN else ""
    shown = ", ".join(kind[:80] for kind in sorted(strange)[:_MOST_SHOWN])
    lacking = (
        f", which has no place for {shown}{more}"
        if strange
        else ", which has a place for all of its tensors"
    )
    return UnsupportedModelError(
        f"{error}; the nearest that works is {nearest.architectures[0]}{lacking}"
    )


def _places(layout: Layout) -> set[str]:
    return {
        place.name for places in (layout.tensors, *layout.alternatives) for place in places.values()
    }
