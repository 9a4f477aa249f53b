"""A worker: runs the commands of rank 0 and sends heartbeats."""

import os
import socket
import struct
import traceback
from contextlib import suppress
from threading import Event, Lock, Thread

from torch.distributed import TCPStore

from headrace.errors import HeadraceError
from headrace.parallel.commands import (
    HEADER,
    Command,
    CommandKind,
    adapter_from_arrays,
    batch_from_arrays,
    body_size,
    decode,
)
from headrace.parallel.launch import LOOPBACK
from headrace.parallel.rank import Rank
from headrace.parallel.transport import GlooTransport

_HEARTBEAT_SECONDS = 0.25
READY = b"\x01"
"""Start of a loaded rank's reply, before its `rank.identity`."""
STAGE_STEPS = b"\x02"
"""Start of a reply with step times, float64 [steps, (begin, end)]."""
LENGTH = struct.Struct("<i")
"""Length before each message; a heartbeat is empty."""


class Channel:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = Lock()
        self._closed = Event()
        Thread(target=self._send_heartbeats, daemon=True).start()

    @property
    def host(self) -> str:
        if self._connection.family == socket.AF_UNIX:
            return LOOPBACK
        return str(self._connection.getpeername()[0])

    def reply(self, body: bytes) -> None:
        with self._lock:
            self._connection.sendall(LENGTH.pack(len(body)) + body)

    def read(self, size: int) -> bytes:
        """Read exactly `size` bytes. Raises EOFError."""
        data = bytearray()
        while len(data) < size:
            chunk = self._connection.recv(min(1 << 20, size - len(data)))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    def close(self) -> None:
        self._closed.set()

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(_HEARTBEAT_SECONDS):
            try:
                self.reply(b"")
            except OSError:  # rank 0 has ended
                os._exit(1)


def run_commands(channel: Channel, rank: Rank, transport: GlooTransport) -> bool:
    """Run commands until the socket ends; return whether rank 0 sent `CLOSE`.

    An error ends the process, and rank 0 restarts the ranks.
    """
    with suppress(EOFError, ConnectionError):
        channel.reply(READY + rank.identity.encode())
        while True:
            header = channel.read(HEADER.size)
            command = decode(header, channel.read(body_size(header)))
            if command.kind == CommandKind.CLOSE:
                return True
            try:
                if command.kind == CommandKind.STAGE_STEPS:
                    channel.reply(STAGE_STEPS + rank.stage_steps().tobytes())
                else:
                    _run_command(command, rank, transport, channel.host)
            except Exception as error:
                channel.reply(f"{type(error).__name__}: {error}".encode())
                if not isinstance(error, HeadraceError):
                    traceback.print_exc()
                os._exit(1)
    return False


def _run_command(command: Command, rank: Rank, transport: GlooTransport, host: str) -> None:
    config, arrays = rank.config, command.arrays
    match command.kind:
        case CommandKind.JOIN if arrays[0] is not None:
            store = TCPStore(host, int(arrays[0][0]), is_master=False, wait_for_workers=False)
            transport.connect(transport.open_groups(store))
        case CommandKind.RUN:
            batch = batch_from_arrays(arrays)
            gathered = rank.run(command.program, batch)
            if config.rank == config.mesh.first_of_last_stage:
                for rows in gathered:
                    if rows is not None and len(rows):
                        transport.send_to(rows, 0)
        case CommandKind.MOVE_SLOTS if arrays[0] is not None and arrays[1] is not None:
            rank.executables[0].move_slots(command.program, arrays[0], arrays[1])
        case CommandKind.ADD_ADAPTER:
            rank.add_adapter(adapter_from_arrays(arrays))
        case CommandKind.REMOVE_ADAPTER:
            rank.remove_adapter(command.program)
