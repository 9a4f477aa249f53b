"""A worker: runs the commands of rank 0 and sends heartbeats."""

import os
import socket
import struct
import traceback
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Any

from torch.distributed import TCPStore

from headrace.backend import HostBlocks
from headrace.errors import HeadraceError, RankLostError
from headrace.parallel.commands import (
    HEADER,
    Array,
    Command,
    CommandKind,
    adapter_from_arrays,
    batch_from_arrays,
    body_size,
    decode,
)
from headrace.parallel.launch import LOOPBACK
from headrace.parallel.process_groups import ProcessGroups
from headrace.parallel.rank import Rank

_HEARTBEAT_SECONDS = 0.25
READY = b"\x01"
"""Start of a loaded rank's reply, before its `rank.identity`."""
ANSWER = b"\x02"
"""Start of the answer to a command that asks: step times, float64 [steps, (begin, end)], or the
error of an adapter.
"""
FAILED = b"\x03"
"""Start of the reply after a failed step, before its generation and the error, which is empty if
another rank has left the step.
"""
GENERATION = struct.Struct("<i")
_STEPS = (
    CommandKind.RUN,
    CommandKind.MOVE_SLOTS,
    CommandKind.SAVE_BLOCK,
    CommandKind.LOAD_BLOCK,
)
"""Commands whose errors end a step, and no process."""
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


def run_commands(channel: Channel, rank: Rank[Any], transport: ProcessGroups) -> bool:
    """Run commands until the socket ends; return whether rank 0 sent `CLOSE`.

    An error of a step ends the step on all ranks. Another error ends the process, and rank 0
    restarts the ranks.
    """
    worker = _Worker(channel, rank, transport)
    with suppress(EOFError, ConnectionError):
        channel.reply(READY + rank.identity.encode())
        while True:
            header = channel.read(HEADER.size)
            command = decode(header, channel.read(body_size(header)))
            if command.kind == CommandKind.CLOSE:
                return True
            try:
                worker.run(command)
            except Exception as error:
                channel.reply(_describe(error))
                if not isinstance(error, HeadraceError):
                    traceback.print_exc()
                os._exit(1)
    return False


class _Worker:
    def __init__(self, channel: Channel, rank: Rank[Any], transport: ProcessGroups) -> None:
        self._channel = channel
        self._rank = rank
        self._transport = transport
        self._generation = 0
        self._host_blocks: HostBlocks | None = None

    def run(self, command: Command) -> None:
        rank, transport, arrays = self._rank, self._transport, command.arrays
        match command.kind:
            case CommandKind.JOIN if arrays[0] is not None:
                self._generation = command.program
                transport.disconnect()
                rank.forget_steps()
                host, port = self._channel.host, int(arrays[0][0])
                store = TCPStore(host, port, is_master=False, wait_for_workers=False)
                transport.connect(transport.open_groups(store))
            case kind if kind in _STEPS:
                if not transport.is_connected:
                    return  # the step has failed on another rank
                try:
                    self._run_step(command)
                except Exception as error:
                    self._leave_groups(error)
            case CommandKind.ADD_ADAPTER:
                self._channel.reply(ANSWER + self._add_adapter(arrays))
            case CommandKind.MAKE_HOST_BLOCKS if arrays[0] is not None:
                self._channel.reply(ANSWER + self._make_host_blocks(arrays[0].tolist()))
            case CommandKind.REMOVE_ADAPTER:
                rank.remove_adapter(command.program)
            case CommandKind.PREPARE if arrays[0] is not None:
                rank.executables[command.program].prepare(*arrays[0].tolist())
            case CommandKind.STAGE_STEPS:
                self._channel.reply(ANSWER + rank.stage_steps().tobytes())

    def _run_step(self, command: Command) -> None:
        rank, arrays = self._rank, command.arrays
        if command.kind == CommandKind.MOVE_SLOTS:
            source, target = arrays
            assert source is not None and target is not None
            rank.move_slots(command.program, source, target)
        elif command.kind in (CommandKind.SAVE_BLOCK, CommandKind.LOAD_BLOCK):
            assert self._host_blocks and arrays[0] is not None
            is_save = command.kind == CommandKind.SAVE_BLOCK
            copy = self._host_blocks.save if is_save else self._host_blocks.load
            copy(command.program, *arrays[0].tolist())
        else:
            rank.run(command.program, batch_from_arrays(arrays))

    def _leave_groups(self, error: Exception) -> None:
        """End the exchanges of a failed step, so that no rank waits for this one."""
        self._transport.disconnect()
        is_own = not isinstance(error, RankLostError)
        if is_own and not isinstance(error, HeadraceError):
            traceback.print_exception(error)
        reason = _describe(error) if is_own else b""
        self._channel.reply(FAILED + GENERATION.pack(self._generation) + reason)

    def _add_adapter(self, arrays: Sequence[Array | None]) -> bytes:
        """Return the error, or nothing. A failed adapter keeps its number until its removal."""
        try:
            self._rank.add_adapter(adapter_from_arrays(arrays))
        except Exception as error:
            self._rank.add_adapter({})
            return _describe(error)
        return b""

    def _make_host_blocks(self, counts: Sequence[int]) -> bytes:
        """Return the error, or nothing."""
        try:
            self._host_blocks = self._rank.make_host_blocks(counts)
        except Exception as error:
            return _describe(error)
        return b""


def _describe(error: Exception) -> bytes:
    return f"{type(error).__name__}: {error}".removesuffix(": ").encode()
