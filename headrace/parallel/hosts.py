"""Ranks on several hosts, one process each, connected through a `torch.distributed` store.

Hosts that reach the store or gloo's ports can read and write the data of ranks: use a private
network.
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
from headrace.parallel.launch import INTERFACE_VARIABLE, Process, start_process
from headrace.record import frozen

EXIT_LOST = 75
"""Exit code of a worker process that has lost rank 0."""
_STORE_KEY = "headrace/rank-0"
_DEFAULT_PORT = 29500
_WAIT_FOR_WORKER_SECONDS = 1800.0
_WAIT_FOR_RANK_0_SECONDS = 120.0
_GREETING = struct.Struct("<32si")
_GREETING_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_SIOCGIFADDR = 0x8915

log = logging.getLogger("headrace.parallel")


@frozen
class Placement:
    rank: int
    size: int
    address: str
    port: int
    has_store: bool


def placement(environment: Mapping[str, str] = os.environ) -> Placement | None:
    """Read the placement of torchrun or a LeaderWorkerSet. Raises RequestError."""
    if "LWS_GROUP_SIZE" in environment:
        names = ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS", "MASTER_PORT")
    elif "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    else:
        return None
    rank, size, address, port = (environment.get(name, "") for name in names)
    port = port or str(_DEFAULT_PORT)
    if not (
        address
        and all(text.isdecimal() for text in (rank, size, port))
        and int(rank) < int(size)
        and 0 < int(port) < 1 << 16
    ):
        values = ", ".join(f"{name}={environment.get(name)}" for name in names)
        raise RequestError(f"the environment has an invalid rank: {values}; set all of these")
    return Placement(
        rank=int(rank),
        size=int(size),
        address=address,
        port=int(port),
        has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


class RemoteProcess:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def kill(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def end_reason(self, seconds: float) -> str:
        return "closed its connection"

    def cpu_ticks(self) -> None:
        return None


class HostLauncher:
    """Receives the connections of workers on other hosts."""

    def __init__(self, place: Placement) -> None:
        self.host = _resolve(place.address)
        self.interface = os.environ.get(INTERFACE_VARIABLE) or interface_of(self.host)
        self._listener = socket.create_server((self.host, 0))
        self._token = secrets.token_hex(16)
        self._store = TCPStore(
            place.address, place.port, is_master=not place.has_store, wait_for_workers=False
        )
        port = self._listener.getsockname()[1]
        self._store.set(_STORE_KEY, f"{self.host} {port} {self._token}")
        self._connections: dict[int, socket.socket] = {}

    def start(self, rank: int) -> Process:
        deadline = time.monotonic() + _WAIT_FOR_WORKER_SECONDS
        if rank not in self._connections:
            log.info("waiting for rank %d", rank)
        while rank not in self._connections:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            self._accept()
        return RemoteProcess(self._connections.pop(rank))

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            raise TimeoutError(
                f"no rank has connected for {_WAIT_FOR_WORKER_SECONDS:.0f} s"
            ) from None
        connection.settimeout(_GREETING_SECONDS)
        with suppress(OSError):
            greeting = connection.recv(_GREETING.size, socket.MSG_WAITALL)
            if len(greeting) == _GREETING.size:
                token, rank = _GREETING.unpack(greeting)
                if hmac.compare_digest(token, self._token.encode()):
                    connection.settimeout(None)
                    self._connections[rank] = connection
                    return
        connection.close()


def run_worker(place: Placement, command: Sequence[str]) -> int:
    """Run the worker process of a rank until rank 0 ends; return the exit code.

    Raises RankLostError if rank 0 cannot be reached.
    """
    while True:
        with _connect_to_rank_0(place) as connection:
            interface = os.environ.get(INTERFACE_VARIABLE)
            interface = interface or interface_of(connection.getsockname()[0])
            environment = {INTERFACE_VARIABLE: interface} if interface else {}
            process = start_process(command, connection, environment)
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        # 1 is the exit code of an error and negative codes are signals: the ranks restart.
        if code not in (EXIT_LOST, 1) and code >= 0:
            return code


def _connect_to_rank_0(place: Placement) -> socket.socket:
    deadline, reason = time.monotonic() + _WAIT_FOR_RANK_0_SECONDS, ""
    while time.monotonic() < deadline:
        try:
            store = TCPStore(
                place.address,
                place.port,
                is_master=False,
                timeout=timedelta(seconds=_GREETING_SECONDS),
                wait_for_workers=False,
            )
            host, port, token = store.get(_STORE_KEY).decode().split()
            connection = socket.create_connection((host, int(port)), _GREETING_SECONDS)
        except (OSError, RuntimeError) as error:
            # Rank 0 has not started yet, or restarts.
            reason = str(error).splitlines()[0]
            time.sleep(_RETRY_SECONDS)
            continue
        connection.settimeout(None)
        connection.sendall(_GREETING.pack(token.encode(), place.rank))
        return connection
    raise RankLostError(
        f"rank 0 cannot be reached at {place.address}:{place.port} for "
        f"{_WAIT_FOR_RANK_0_SECONDS:.0f} s: {reason}"
    )


def interface_of(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                reply = ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return "lo" if address.startswith("127.") else ""


def _resolve(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise RequestError(f"host '{name}' of rank 0 is unknown: {error.strerror}") from None
