"""The server with injected faults: `python -m tests.server.faulty_server serve ...`.

A request asks for a fault by its seed: some function raises for this request at one stage. Both
processes are real. The time of day jumps by an hour back and forth, which no timeout may notice.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

FIRST = 666_000
STAGES = (
    "template",
    "tokenizer",
    "check",
    "grammar",
    "mask",
    "find",
    "build",
    "launch",
    "detokenizer",
    "result",
    "event",
)
ENDS = ("death", "stop", "news")
"""Stages at which the engine ends: by a signal, by a hang, and by an error outside of any request.
"""
SEEDS = {stage: FIRST + i for i, stage in enumerate((*STAGES, *ENDS))}
MARK = "poison"
"""Marks the prompt of a request whose fault precedes its sampling parameters."""


class PlannedError(Exception):
    """An error of a type that no code expects."""


def fail_if(function: Callable[..., Any], is_meant: Callable[..., bool]) -> Callable[..., Any]:
    """Wrap a function so that it raises for some arguments."""

    def call(*args: Any, **options: Any) -> Any:
        if is_meant(*args, **options):
            raise PlannedError("at 0x7f0000000000 in /home/someone/file.py")
        return function(*args, **options)

    return call


def plan(owner: Any, name: str, is_meant: Callable[..., bool]) -> None:
    setattr(owner, name, fail_if(getattr(owner, name), is_meant))


def serve() -> None:
    """Run the API process."""
    from headrace.checkpoint.templates import Renderer
    from headrace.checkpoint.tokenizer import Tokenizer
    from headrace.cli import entry
    from headrace.remote import start as engine_start
    from headrace.server.chat import _Response

    plan(
        Renderer,
        "render",
        lambda self, template, names, *_, **__: f"{MARK} template" in repr(names),
    )
    plan(Tokenizer, "encode", lambda self, text, *_, **__: f"{MARK} tokenizer" in text)
    plan(
        _Response,
        "_event",
        lambda self, *_, **__: (
            self._request.seed == SEEDS["event"] and self._generation.usage.completion > 3
        ),
    )
    engine_start.COMMAND = (sys.executable, "-m", "tests.server.faulty_server")
    entry()


def engine() -> None:
    """Run the engine process."""
    from headrace.engine import step
    from headrace.engine.engine import Engine
    from headrace.engine.jump_forward import JumpForward
    from headrace.engine.multi_step import MultiStep
    from headrace.engine.output import Output
    from headrace.engine.scheduled import ScheduledSequence
    from headrace.engine.sequence import Request
    from headrace.grammar.constraint import Constraints
    from headrace.remote import host as engine_host
    from headrace.remote import process as engine_process

    def meant(stage: str, least: int = 0) -> Callable[..., bool]:
        """Return a check whether a step has a sequence of the stage with this many tokens."""
        return lambda self, scheduled, *_, **__: any(
            item.seq.request.params.seed == SEEDS[stage] and len(item.seq.output.token_ids) >= least
            for item in scheduled
        )

    def end_process(number: int) -> Callable[..., bool]:
        def look(self: Any, scheduled: Any, *_: Any, **__: Any) -> bool:
            if meant({signal.SIGKILL: "death", signal.SIGSTOP: "stop"}[number], 3)(self, scheduled):  # type: ignore[index]
                # To this thread: another thread might be late to stop the process.
                signal.pthread_kill(threading.get_ident(), number)
            return False

        return look

    plan(
        Engine,
        "check",
        lambda self, ids, params=None, *_, **__: params and params.seed == SEEDS["check"],
    )
    plan(Constraints, "make", lambda self, params, *_: params.seed == SEEDS["grammar"])
    masks = fail_if(
        ScheduledSequence.masks.fget,
        lambda self: (
            self.seq.request.params.seed == SEEDS["mask"] and len(self.seq.output.token_ids) > 2
        ),
    )
    ScheduledSequence.masks = property(masks)  # type: ignore[assignment]
    plan(JumpForward, "find", meant("find", 2))
    plan(MultiStep, "plan", meant("launch", 3))
    plan(step, "build_batch", lambda scheduled, *_: meant("build")(None, scheduled))
    plan(
        Output,
        "push",
        lambda self, *_: self._params.seed == SEEDS["detokenizer"] and len(self.token_ids) > 3,
    )
    plan(
        Request,
        "new_updates",
        lambda self: self.params.seed == SEEDS["news"] and len(self.seqs[0].output.token_ids) > 3,
    )
    plan(
        engine_host,
        "ended_event",
        lambda request_id, result: len(result.outputs[0].token_ids) == 13,
    )
    for number in (signal.SIGKILL, signal.SIGSTOP):
        plan(MultiStep, "plan", end_process(number))
    engine_process.main(*sys.argv[1:])


def let_the_clock_jump() -> None:
    """Replace the clock before any module imports it."""
    now, jumps = time.time, cycle((0, 3600, -3600))
    time.time = lambda: now() + next(jumps)


if __name__ == "__main__":
    let_the_clock_jump()
    serve() if sys.argv[1] == "serve" else engine()
