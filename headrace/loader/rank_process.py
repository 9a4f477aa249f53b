"""The process of a rank that is not the first: it opens the same model, compiles its share, and
does what rank 0 says.

`headrace.parallel.launch` starts it with a socket that it inherits, over which its setup comes
first. It ends when that is closed.
"""

import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

from headrace.errors import HeadraceError
from headrace.loader.drafts import compile_draft_models, open_draft_checkpoints, target_program
from headrace.loader.load import open_model
from headrace.loader.options import engine_config
from headrace.parallel.collectives import Exchange
from headrace.parallel.config import mesh_of
from headrace.parallel.hosts import LOST
from headrace.parallel.rank import Rank, RankConfig
from headrace.parallel.setup import kv_config_of
from headrace.parallel.transport import GlooCarrier
from headrace.parallel.worker import REPLY, Channel, follow

_PR_SET_PDEATHSIG = 1


def make_rank(setup: dict[str, Any]) -> tuple[Rank, GlooCarrier]:
    """The rank of a setup, with all that is attached to it. Raises as `load_model`."""
    config = engine_config(setup["config"])
    mesh = mesh_of(config)
    checkpoint = open_model(setup["model"], config)
    carrier = GlooCarrier(mesh, setup["rank"])
    rank_config = RankConfig(
        mesh, setup["rank"], kv_config_of(setup), setup["threads"], config.activations
    )
    rank = Rank(
        rank_config, target_program(config, checkpoint), checkpoint.tensors, Exchange(carrier)
    )
    alike = replace(config, draft_model="")  # which runs on rank 0 alone
    drafts = open_draft_checkpoints(alike, checkpoint, checkpoint.load_tokenizer())
    compile_draft_models(alike, drafts, checkpoint, rank, None)
    return rank, carrier


def main(descriptor: str, parent: str) -> None:
    """Follow rank 0, the process of this id, over the socket with this descriptor."""
    faulthandler.enable()
    with suppress(OSError, AttributeError):  # also a process that is stopped ends with rank 0
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # signals of a terminal are for rank 0
    channel = Channel(socket.socket(fileno=int(descriptor)))
    try:
        (size,) = REPLY.unpack(channel.read(REPLY.size))
        setup = json.loads(channel.read(size))
        rank, carrier = make_rank(setup)
    except EOFError:
        sys.exit(LOST)
    except HeadraceError as error:
        channel.reply(str(error).encode())
        sys.exit(error.exit_code)
    if not follow(channel, rank, carrier):
        sys.exit(LOST)


if __name__ == "__main__":
    main(*sys.argv[1:])
