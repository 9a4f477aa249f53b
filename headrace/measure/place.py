"""Devices by name, with their roofs, links and price: a machine file, or this machine."""

from headrace.backend_traits import BackendName
from headrace.errors import RequestError
from headrace.parallel.mesh import Mesh
from headrace.planner import hardware, host
from headrace.planner.calibration import stored_calibration
from headrace.planner.hardware import Machine
from headrace.planner.machine_files import MachineFile, read_machine
from headrace.planner.step_time import Link, Reaches, known_reaches
from headrace.record import frozen

THIS = "this"
"""Name of the machine that runs the command."""
_EXCHANGE_SECONDS = 8e-6
"""Fixed time of an exchange on one host: an estimate."""
_LINK_SHARE = 0.8
"""Share of a link's bandwidth that exchanges reach: an estimate."""


@frozen(kw_only=True)
class Place:
    """The devices of a plan."""

    name: str
    title: str
    backend: BackendName
    machine: Machine
    memory: int
    """Bytes of a device."""
    mesh: Mesh
    link: Link | None
    reaches: Reaches
    price: float | None
    """Dollars an hour of a device."""
    sources: tuple[str, ...]


def find_place(on: str, mesh: Mesh) -> Place:
    """Return the devices with this name. Raises RequestError."""
    if on == THIS:
        return _this(mesh)
    found = read_machine(on)
    reaches = known_reaches(found.backend)
    assert reaches
    return Place(
        name=on,
        title=found.name,
        backend=found.backend,
        machine=found.machine(),
        memory=int(found.memory.value),
        mesh=mesh,
        link=_link(found, mesh),
        reaches=reaches,
        price=found.price.value if found.price else None,
        sources=tuple(f"{s.title}, {s.date}, {s.url}" for s in found.sources()),
    )


def cpu_reaches() -> Reaches:
    """The stored calibration of this machine, or the measured speeds of another one."""
    stored = stored_calibration()
    reaches = stored.reaches if stored else known_reaches("cpu")
    assert reaches
    return reaches


def _this(mesh: Mesh) -> Place:
    if mesh.ranks > 1:
        raise RequestError("machine 'this' is one device: leave out -tp and -pp, or name another")
    machine, reaches = hardware.this_machine(), cpu_reaches()
    return Place(
        name=THIS,
        title=f"this machine ({machine.cpu}, {machine.at_work})",
        backend="cpu",
        machine=machine,
        memory=host.available_memory(),
        mesh=mesh,
        link=None,
        reaches=reaches,
        price=None,
        sources=("measured by headrace doctor",),
    )


def _link(found: MachineFile, mesh: Mesh) -> Link | None:
    if mesh.ranks == 1:
        return None
    if found.link is None:
        raise RequestError(
            f"machine '{found.key}' has no link to another; use -tp 1 -pp 1, or name a machine "
            "with links"
        )
    return Link(found.link.value * _LINK_SHARE, _EXCHANGE_SECONDS)
