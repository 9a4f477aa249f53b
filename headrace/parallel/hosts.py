"""Ranks on several hosts, where something else starts the same command once for each: torchrun, or
a LeaderWorkerSet.

Its environment says which rank a process is, and where a store of `torch.distributed` is or may be.
There rank 0 leaves its address and a token. A process of another rank runs nothing itself: it
connects, and has a process follow rank 0 over the connection, a new one whenever the ranks are
started again.

All that can reach the store and the ports of gloo can read and write what ranks exchange: these
belong in a network of their own.
"""

import hmac
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from fcntl import ioctl

from torch.distributed import TCPStore

from headrace.errors import RankLostError, RequestError
from headrace.parallel.launch import INTERFACE, Process, start_process
from headrace.record import frozen

LOST = 75
"""Exit code of a process that follows rank 0 and has lost it."""
_KEY = "headrace/rank-0"
_PORT = 29500
"""Of the store, where the environment names none, as in torchrun."""
_COME = 1800.0
"""Seconds for which rank 0 waits for another."""
_GONE = 120.0
"""Seconds for which another waits for rank 0."""
_HELLO = struct.Struct("<32si")
"""What another says first: the token and its rank."""
_PATIENCE = 5.0
_SIOCGIFADDR = 0x8915

log = logging.getLogger("headrace.parallel")


@frozen
class Placement:
    """Which rank of how many this process is, and where they meet."""

    rank: int
    size: int
    address: str
    port: int
    has_store: bool
    """Whether there is a store at the address; else rank 0 makes one."""


def placement(environment: Mapping[str, str] = os.environ) -> Placement | None:
    """What torchrun or a LeaderWorkerSet says of this process; None: nothing. Raises RequestError
    for what cannot be.
    """
    if "LWS_GROUP_SIZE" in environment:
        names = ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS", "MASTER_PORT")
    elif "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    else:
        return None
    rank, size, address, port = (environment.get(name, "") for name in names)
    port = port or str(_PORT)
    if not (
        address
        and all(text.isdecimal() for text in (rank, size, port))
        and int(rank) < int(size)
        and 0 < int(port) < 1 << 16
    ):
        found = ", ".join(f"{name}={environment.get(name)}" for name in names)
        raise RequestError(f"the environment does not say which rank this is: {found}")
    return Placement(
        rank=int(rank),
        size=int(size),
        address=address,
        port=int(port),
        has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


class RemoteProcess:
    """A process of another host: it ends when its connection is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def kill(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def ended(self, seconds: float) -> str:
        return "closed its connection"

    def ticks(self) -> None:
        return None


class HostLauncher:
    """Receives the processes of other hosts, which come by themselves."""

    def __init__(self, place: Placement) -> None:
        self.host = _address(place.address)
        self.interface = os.environ.get(INTERFACE) or interface_of(self.host)
        self._listener = socket.create_server((self.host, 0))
        self._token = secrets.token_hex(16)
        self._store = TCPStore(
            place.address, place.port, is_master=not place.has_store, wait_for_workers=False
        )
        self._store.set(_KEY, f"{self.host} {self._listener.getsockname()[1]} {self._token}")
        self._came: dict[int, socket.socket] = {}

    def start(self, rank: int) -> Process:
        deadline = time.monotonic() + _COME
        if rank not in self._came:
            log.info("waiting for rank %d", rank)
        while rank not in self._came:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            self._receive()
        return RemoteProcess(self._came.pop(rank))

    def close(self) -> None:
        self._listener.close()

    def _receive(self) -> None:
        """The next that comes, if it has the token. Raises TimeoutError where none does."""
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            raise TimeoutError(f"no other rank has come for {_COME:.0f} s") from None
        connection.settimeout(_PATIENCE)
        with suppress(OSError):
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(hello) == _HELLO.size:
                token, rank = _HELLO.unpack(hello)
                if hmac.compare_digest(token, self._token.encode()):
                    connection.settimeout(None)
                    self._came[rank] = connection
                    return
        connection.close()


def follow_rank_0(place: Placement, command: Sequence[str]) -> int:
    """Have a process follow rank 0, and another when that one has lost it, until rank 0 ends;
    returns the exit code.

    `command`: as in `launch.start_process`. Raises RankLostError where there is no rank 0.
    """
    while True:
        with _reach(place) as connection:
            interface = os.environ.get(INTERFACE) or interface_of(connection.getsockname()[0])
            process = start_process(
                command, connection, {INTERFACE: interface} if interface else {}
            )
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        if code not in (LOST, 1) and code >= 0:
            return code


def _reach(place: Placement) -> socket.socket:
    """A connection to rank 0."""
    deadline, why = time.monotonic() + _GONE, ""
    while time.monotonic() < deadline:
        try:
            store = TCPStore(
                place.address,
                place.port,
                is_master=False,
                timeout=timedelta(seconds=_PATIENCE),
                wait_for_workers=False,
            )
            host, port, token = store.get(_KEY).decode().split()
            connection = socket.create_connection((host, int(port)), _PATIENCE)
        except (
            OSError,
            RuntimeError,
        ) as error:  # it is not there yet, or has gone and will come again
            why = str(error).splitlines()[0]
            time.sleep(0.2)
            continue
        connection.settimeout(None)
        connection.sendall(_HELLO.pack(token.encode(), place.rank))
        return connection
    raise RankLostError(f"rank 0 is not at {place.address}:{place.port} for {_GONE:.0f} s: {why}")


def interface_of(address: str) -> str:
    """The network interface that has an address of this host; empty where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return "lo" if address.startswith("127.") else ""


def _address(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise RequestError(f"the host of rank 0, {name}, is not known: {error.strerror}") from None
