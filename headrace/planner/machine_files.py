"""Machines that one can buy or rent, as data: `machines/NAME.toml`.

A file has the figures of one device (a GPU, or all cores of a server), and the source of each.
Rates are without sparsity. A link's figure is one direction.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, cast

from headrace.backend_traits import BackendName, traits_of
from headrace.errors import FormatError, RequestError
from headrace.planner.hardware import KINDS, Machine
from headrace.record import frozen

FOLDER = Path(__file__).parent / "machines"
_NETWORKS = Path(__file__).parent / "networks.toml"
_DATE = re.compile(r"20\d\d-[01]\d")


@frozen
class Source:
    title: str
    date: str
    """Year and month."""
    url: str


@frozen
class Figure:
    value: float
    source: Source


@frozen(kw_only=True)
class MachineFile:
    """Facts of a device, in bytes, bytes/s, operations/s, and dollars an hour."""

    key: str
    name: str
    backend: BackendName
    processor: str
    units: int
    """Cores, or multiprocessors of a GPU."""
    memory: Figure
    bandwidth: Figure
    rates: Mapping[str, Figure]
    """By number format: f32, bf16 and int8, and further ones of GPUs."""
    links: Mapping[str, Figure]
    """By kind: nvlink, infinity_fabric, pcie."""
    cache: Figure | None = None
    """Last-level cache."""
    price: Figure | None = None
    devices: tuple[str, ...] = ()
    """Names that drivers report."""

    @property
    def is_gpu(self) -> bool:
        return traits_of(self.backend).on_gpu

    @property
    def link(self) -> Figure | None:
        """The fastest link to another device."""
        return max(self.links.values(), key=lambda figure: figure.value, default=None)

    def machine(self) -> Machine:
        """The roofs of the datasheet, in the form of measured ones."""
        return Machine(
            cpu=self.name,
            isa=self.processor,
            threads=self.units,
            bandwidth=self.bandwidth.value,
            rates={kind: self.rates[kind].value for kind in KINDS},
        )

    def sources(self) -> list[Source]:
        """Each source once, in the order of the figures."""
        figures = [self.memory, self.bandwidth, self.cache, *self.rates.values()]
        figures += [*self.links.values(), self.price]
        return list(dict.fromkeys(figure.source for figure in figures if figure))


@frozen
class Network:
    """A network between hosts."""

    key: str
    bandwidth: float
    """Bytes/s of one direction."""
    seconds: float
    """Fixed time of an exchange: an estimate."""
    source: Source


@cache
def networks() -> Mapping[str, Network]:
    entries = tomllib.loads(_NETWORKS.read_text())
    return {
        key: Network(key, entry["bandwidth"], entry["seconds"], Source(*entry["source"]))
        for key, entry in entries.items()
    }


def machine_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@cache
def read_machine(name: str) -> MachineFile:
    """Read a machine by its name. Raises RequestError for an unknown one."""
    names = machine_names()
    if name not in names:
        close = get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise RequestError(
            f"machine '{name}' is unknown; {hint}known are: this, {', '.join(names)}"
        )
    path = FOLDER / f"{name}.toml"
    return parse_machine(name, tomllib.loads(path.read_text()))


def machine_file_of(machine: Machine) -> MachineFile | None:
    """The file of a GPU that is here, by the name that its driver reports."""
    files = map(read_machine, machine_names()) if machine.is_gpu else ()
    return next((found for found in files if machine.cpu in found.devices), None)


def parse_machine(key: str, record: Mapping[str, Any]) -> MachineFile:
    """Check a record of a file. Raises FormatError that names the field."""
    try:
        sources = {name: Source(*entry) for name, entry in record["sources"].items()}
        figures = dict(record["figures"])
        is_gpu = traits_of(record["backend"]).on_gpu
        found = MachineFile(
            key=key,
            name=record["name"],
            backend=cast(BackendName, record["backend"]),
            processor=record["processor"],
            units=record["multiprocessors" if is_gpu else "cores"],
            memory=_figure(key, "memory", figures.pop("memory"), sources),
            bandwidth=_figure(key, "bandwidth", figures.pop("bandwidth"), sources),
            rates=_figures(key, "rate", figures.pop("rate"), sources),
            links=_figures(key, "link", figures.pop("link", {}), sources),
            cache=_optional(key, "cache", figures.pop("cache", None), sources),
            price=_optional(key, "price", figures.pop("price", None), sources),
            devices=tuple(record.get("devices", ())),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"machine '{key}': a field is missing or malformed: {error}") from None

    for name, source in sources.items():
        if not (_DATE.fullmatch(source.date) and source.url.startswith("https://")):
            raise FormatError(
                f"machine '{key}': source '{name}' needs a title, a date as 2026-11, and an address"
            )
    if absent := [kind for kind in KINDS if kind not in found.rates]:
        raise FormatError(f"machine '{key}': figures lack the rate of {', '.join(absent)}")
    if figures:
        raise FormatError(f"machine '{key}': unknown figures: {', '.join(figures)}")
    return found


def _figures(
    key: str, field: str, values: Mapping[str, Any], sources: Mapping[str, Source]
) -> dict[str, Figure]:
    return {name: _figure(key, f"{field}.{name}", value, sources) for name, value in values.items()}


def _optional(key: str, field: str, value: Any, sources: Mapping[str, Source]) -> Figure | None:
    return None if value is None else _figure(key, field, value, sources)


def _figure(key: str, field: str, value: Any, sources: Mapping[str, Source]) -> Figure:
    match value:
        case [int() | float() as number, str(source)] if 0 < number < math.inf:
            if source in sources:
                return Figure(float(number), sources[source])
    raise FormatError(
        f"machine '{key}': figure '{field}' is {value!r}; write [positive number, name of a source]"
    )
