"""A rank that carries out what rank 0 tells it, over a socket, until that is closed.

It says that it is alive a few times a second, whatever it does, so that rank 0 finds one that is
stopped.
"""

import os
import socket
import struct
import traceback
from contextlib import suppress
from threading import Event, Lock, Thread

from torch.distributed import TCPStore

from headrace.errors import HeadraceError
from headrace.parallel.commands import HEAD, Command, Kind, adapter_of, batch_of, body_size, decode
from headrace.parallel.launch import LOOPBACK
from headrace.parallel.rank import Rank
from headrace.parallel.transport import GlooCarrier

ALIVE = 0.25
"""Seconds between two signs of life."""
READY = b"\x01"
"""Begins a reply that says what the rank is (`rank.identity`): it has its share."""
STAGE_STEPS = b"\x02"
"""Begins a reply that says when steps ran: float64, [steps, (begin, end)]."""
REPLY = struct.Struct("<i")
"""The size of a reply; one of no size is a sign of life."""


class Channel:
    """The follower's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = Lock()
        self._over = Event()
        Thread(target=self._live, daemon=True).start()

    @property
    def host(self) -> str:
        """Where rank 0 is."""
        return (
            LOOPBACK
            if self._connection.family == socket.AF_UNIX
            else str(self._connection.getpeername()[0])
        )

    def reply(self, body: bytes) -> None:
        """Say something to rank 0."""
        with self._lock:
            self._connection.sendall(REPLY.pack(len(body)) + body)

    def read(self, size: int) -> bytes:
        """So many bytes from rank 0. Raises EOFError where it has closed the socket."""
        parts = bytearray()
        while len(parts) < size:
            part = self._connection.recv(min(1 << 20, size - len(parts)))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """No more signs of life."""
        self._over.set()

    def _live(self) -> None:
        while not self._over.wait(ALIVE):
            try:
                self.reply(b"")
            except OSError:  # rank 0 has gone
                os._exit(1)


def follow(channel: Channel, rank: Rank, carrier: GlooCarrier) -> bool:
    """Carry out commands to the end of the socket; whether it was told to end. An error is told,
    and ends the process: rank 0 starts another.
    """
    with suppress(EOFError, ConnectionError):
        channel.reply(READY + rank.identity.encode())
        while True:
            head = channel.read(HEAD.size)
            command = decode(head, channel.read(body_size(head)))
            if command.kind == Kind.CLOSE:
                return True
            try:
                if command.kind == Kind.STAGE_STEPS:
                    channel.reply(STAGE_STEPS + rank.stage_steps().tobytes())
                else:
                    _obey(command, rank, carrier, channel.host)
            except Exception as error:
                channel.reply(f"{type(error).__name__}: {error}".encode())
                if not isinstance(error, HeadraceError):
                    traceback.print_exc()
                os._exit(1)
    return False


def _obey(command: Command, rank: Rank, carrier: GlooCarrier, host: str) -> None:
    config, arrays = rank.config, command.arrays
    match command.kind:
        case Kind.JOIN if arrays[0] is not None:
            carrier.connect(
                carrier.groups(
                    TCPStore(host, int(arrays[0][0]), is_master=False, wait_for_workers=False)
                )
            )
        case Kind.RUN:
            batch = batch_of(arrays)
            executable = rank.run(command.program, batch)
            if config.rank == config.mesh.first_of_last_stage:
                for rows in (
                    executable.logits(batch),
                    executable.hidden(batch),
                    executable.pooled(batch),
                ):
                    if rows is not None and len(rows):
                        carrier.send_to(rows, 0)
        case Kind.MOVE_SLOTS if arrays[0] is not None and arrays[1] is not None:
            rank.executables[0].move_slots(command.program, arrays[0], arrays[1])
        case Kind.ADD_ADAPTER:
            rank.add_adapter(adapter_of(arrays))
        case Kind.REMOVE_ADAPTER:
            rank.remove_adapter(command.program)
