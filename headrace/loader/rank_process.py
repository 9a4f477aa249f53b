"""Process of a rank other than 0: opens the model, compiles its share, and runs rank 0's commands.

`headrace.parallel.launch` starts the process with an inherited socket. The first
message on the socket is the setup; the process ends when rank 0 closes the socket.
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
from headrace.parallel.config import local_rank, mesh_of
from headrace.parallel.hosts import EXIT_LOST
from headrace.parallel.make_rank import make_rank, make_transport
from headrace.parallel.process_groups import ProcessGroups
from headrace.parallel.rank import Rank, RankConfig
from headrace.parallel.setup import kv_config_of
from headrace.parallel.worker import LENGTH, Channel, run_commands

_PR_SET_PDEATHSIG = 1


def open_rank(setup: dict[str, Any]) -> tuple[Rank[Any], ProcessGroups]:
    """Make the rank of a setup, with its draft programs attached. Raises as `load_model`."""
    config = engine_config(setup["config"])
    mesh = mesh_of(config)
    if config.traits.on_gpu:
        from headrace.backend.cuda.device import use_gpu

        use_gpu(local_rank(mesh, setup["rank"]))
    checkpoint = open_model(setup["model"], config)
    rank_config = RankConfig(
        backend=config.backend,
        mesh=mesh,
        rank=setup["rank"],
        kv=kv_config_of(setup),
        threads=setup["threads"],
        activations=config.activations,
    )
    transport = make_transport(rank_config)
    program = target_program(config, checkpoint, setup["taps"])
    rank = make_rank(rank_config, program, checkpoint.tensors, transport)
    shared = replace(config, draft_model="")  # only rank 0 runs a draft model or drafter
    drafts = open_draft_checkpoints(shared, checkpoint, checkpoint.load_tokenizer)
    compile_draft_models(shared, drafts, checkpoint, rank, None)
    return rank, transport


def main(descriptor: str, parent: str) -> None:
    """Follow rank 0, the process with id `parent`, over the socket `descriptor`."""
    faulthandler.enable()
    with suppress(OSError, AttributeError):  # so that a stopped process ends with rank 0, too
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # rank 0 handles the signals of the terminal
    channel = Channel(socket.socket(fileno=int(descriptor)))
    try:
        (size,) = LENGTH.unpack(channel.read(LENGTH.size))
        setup = json.loads(channel.read(size))
        rank, transport = open_rank(setup)
    except EOFError:
        sys.exit(EXIT_LOST)
    except HeadraceError as error:
        channel.reply(str(error).encode())
        sys.exit(error.exit_code)
    if not run_commands(channel, rank, transport):
        sys.exit(EXIT_LOST)


if __name__ == "__main__":
    main(*sys.argv[1:])
