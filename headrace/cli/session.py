"""A loaded model and its answers, for `headrace run` alone and in a chat."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from types import TracebackType

from headrace.assembly.load import load_model
from headrace.backend import lower_program
from headrace.config import EngineConfig
from headrace.model import trace_model
from headrace.planner import hardware, roofline
from headrace.program.kv import number_bytes
from headrace.prompts import Message, Prompt
from headrace.request import RequestOutput, SamplingParams


class Session:
    """One model, one request at a time."""

    def __init__(self, model: str, config: EngineConfig) -> None:
        self.config = config
        self._engine, self._prompts, _, self._checkpoint = load_model(model, config)
        self.result: RequestOutput | None = None
        """Of the last answer."""

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._prompts.close()
        self._engine.close()

    def answer(self, prompt: Prompt | Sequence[Message], params: SamplingParams, stop: Event) -> Iterator[str]:
        """The continuation of a text, or the answer to a conversation, in pieces; `stop` ends it. Sets `result`.

        Raises RequestError for what does not fit in the context, and the request's own error if it fails on the way.
        """
        token_ids, text = self._prompts.read(prompt)
        request_id = self._engine.add_request(token_ids, params, prompt=text)
        self.result = None
        while self.result is None:
            if stop.is_set():
                self.result = self._engine.abort(request_id)
                return
            for update in self._engine.step():
                self.result = update.result
                if update.text:
                    yield update.text
        if self.result.error:
            raise self.result.error

    def closing_line(self) -> str:
        """Tokens and speed of the last answer, the limit that this machine sets to plain decoding, and the accepted draft tokens."""
        result = self.result
        if result is None:
            return ""
        num_in, num_out = len(result.prompt_token_ids), len(result.outputs[0].token_ids)
        computed = num_in - result.cached_tokens
        what = f"in, {result.cached_tokens:,} cached" if result.cached_tokens else "in"
        parts = [_rate(num_in, what, computed, result.timing.prefill), _rate(num_out, "out", num_out - 1, result.timing.decode)]
        if num_out > 1 and result.timing.decode > 0:
            speed = (num_out - 1) / result.timing.decode
            limit = self._decode_limit(num_in + num_out // 2, speed)
            parts.append(f"limit {limit:,.0f} tok/s, {speed / limit:.0%}".replace("%", " %"))
        if accepted := sum(stats.accepted for stats in result.drafts.values()):
            parts.append(f"{accepted:,} accepted from drafts")
        return f"[{' · '.join(parts)}]"

    def _decode_limit(self, depth: int, speed: float) -> float:
        """For plain decoding. A measurement that the answer has just beaten was taken on a busy machine, and is taken again."""
        traced = trace_model(self._checkpoint.spec, self._checkpoint.tensors)
        program = lower_program(self.config.backend, traced, self._checkpoint.tensors)
        threads, kv_bytes = self.config.threads, number_bytes(program.kv_groups, self.config.kv_dtype)
        limit = roofline.decode_limit(program, hardware.this_machine(threads), depth, kv_bytes)
        if speed > limit and self.result and not self.result.drafts:
            limit = roofline.decode_limit(program, hardware.measure(threads), depth, kv_bytes)
        return limit


@contextmanager
def interrupts() -> Iterator[Event]:
    """While it lasts, Ctrl-C sets the event instead of cutting a step of the engine in two."""
    stop = Event()
    previous = signal.signal(signal.SIGINT, lambda number, frame: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


def _rate(count: int, what: str, computed: int, seconds: float) -> str:
    return f"{count:,} {what}, {computed / seconds:,.0f} tok/s" if computed > 0 and seconds > 0 else f"{count:,} {what}"
