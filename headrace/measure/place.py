"""Devices by name, with their roofs, links and price: a machine file, or this machine."""

from headrace.backend_traits import BackendName
from headrace.errors import RequestError
from headrace.parallel.mesh import Mesh
from headrace.planner import hardware, host
from headrace.planner.calibration import stored_calibration
from headrace.planner.hardware import Machine
from headrace.planner.machine_files import MachineFile, Network, networks, read_machine
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


def find_place(on: str, mesh: Mesh, network: str | None = None) -> Place:
    """Return the devices with this name; `network` connects the stages of a pipeline, each of
    which is then on a host of its own.

    Raises RequestError for an unknown machine or network, and for devices without a link.
    """
    if on == THIS:
        return _this(mesh)
    found, between = read_machine(on), _network(network, mesh)
    reaches = known_reaches(found.backend)
    assert reaches
    return Place(
        name=on,
        title=found.name,
        backend=found.backend,
        machine=found.machine(),
        memory=int(found.memory.value),
        mesh=mesh,
        link=_link(found, mesh, between),
        reaches=reaches,
        price=found.price.value if found.price else None,
        sources=tuple(
            f"{s.title}, {s.date}, {s.url}"
            for s in (*found.sources(), *([between.source] if between else []))
        ),
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


def _network(name: str | None, mesh: Mesh) -> Network | None:
    if name is None:
        return None
    known = networks()
    if name not in known:
        raise RequestError(f"network '{name}' is unknown; known are: {', '.join(known)}")
    if mesh.pipeline == 1:
        raise RequestError(
            f"network '{name}' connects pipeline stages, and there is one; add -pp 2"
        )
    return known[name]


def _link(found: MachineFile, mesh: Mesh, network: Network | None) -> Link | None:
    between = Link(network.bandwidth * _LINK_SHARE, network.seconds) if network else None
    if mesh.ranks == 1 or (mesh.tensor == 1 and between):
        return between
    if found.link is None:
        remedy = "leave out -tp, or" if between else "use -tp 1 -pp 1, add --network, or"
        raise RequestError(
            f"machine '{found.key}' has no link to another; {remedy} name a machine with links"
        )
    return Link(found.link.value * _LINK_SHARE, _EXCHANGE_SECONDS, between)
