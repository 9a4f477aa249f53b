"""A loaded model and its answers, for `headrace run` alone and in a chat."""

import atexit
import gc
from collections.abc import Iterator, Sequence
from types import TracebackType

from headrace.backend import lower_program
from headrace.checkpoint.adapter import read_adapter
from headrace.checkpoint.source import resolve
from headrace.cli.signals import Stop
from headrace.config import EngineConfig
from headrace.loader.drafts import model_program
from headrace.loader.load import load_model
from headrace.outputs import RequestOutput, Update
from headrace.planner import hardware
from headrace.planner.answer import decode_seconds, decode_steps
from headrace.program.adapter import Adapter, adapted
from headrace.program.kv import number_bytes
from headrace.prompts import Message, Prompt
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams


class Session:
    """One model, one request at a time."""

    def __init__(
        self, model: str, config: EngineConfig, adapter: tuple[str, str] | None = None
    ) -> None:
        """`adapter`: name and path of the one that all is answered with."""
        self._engine, self._prompts, _, self._checkpoint = load_model(model, config)
        self.config = self._engine.config
        # all of it stays, so that the collector need not look at it again, at exit either
        gc.freeze()
        if self.config.traits.on_gpu:
            # what torch and Triton hold would count as leaks of the native module
            atexit.register(gc.unfreeze)
        self._adapter = adapter[0] if adapter else None
        self._matrices: Adapter = {}
        if adapter:
            try:
                self._matrices = read_adapter(resolve(adapter[1]), self._checkpoint.spec)
                self._engine.load_adapter(adapter[0], self._matrices)
            except BaseException:
                self.__exit__(None, None, None)
                raise
        self.result: RequestOutput | None = None
        """Of the last answer."""
        self._beam_width: int | None = None
        """Of the search for the last answer; None if it was not searched for."""

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._prompts.close()
        self._engine.close()

    def answer(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams, stop: Stop
    ) -> Iterator[Update]:
        """What comes of a text that is continued, or a conversation that is answered, piece by
        piece; `stop` ends it. Sets `result`.

        Raises RequestError for what does not fit in the context, and the request's own error if it
        fails on the way.
        """
        token_ids, text = self._prompts.read(prompt)
        request_id = self._engine.add_request(
            token_ids, params, RequestOptions(adapter=self._adapter), prompt=text
        )
        self.result, self._beam_width = None, params.beam_width
        while self.result is None:
            if stop.is_set():
                self.result = self._engine.abort(request_id)
                return
            for update in self._engine.step():
                self.result = update.result
                yield update
        if self.result.error:
            raise self.result.error

    def closing_line(self) -> str:
        """Tokens and speed of the last answer, the limit that this machine sets to its steps,
        accepted draft tokens, what is lossy.
        """
        result = self.result
        if result is None:
            return ""
        num_in, num_seqs = len(result.prompt_token_ids), len(result.outputs)
        num_out = sum(len(output.token_ids) for output in result.outputs)
        computed = num_in - result.cached_tokens
        what = f"in, {result.cached_tokens:,} cached" if result.cached_tokens else "in"
        prefill = result.timing.prefill
        parts = [
            f"{num_in:,} {what}, {computed / prefill:,.0f} tok/s"
            if computed > 0 and prefill > 0
            else f"{num_in:,} {what}"
        ]
        if share := self._share_of_limit(result):
            speed = (num_out - num_seqs) / result.timing.decode
            parts.append(f"{num_out:,} out, {speed:,.0f} tok/s")
            parts.append(f"limit {speed / share:,.0f} tok/s, {share:.0%}".replace("%", " %"))
        else:
            parts.append(f"{num_out:,} out")
        if accepted := sum(stats.accepted for stats in result.drafts.values()):
            parts.append(f"{accepted:,} accepted from drafts")
        if self.config.lossy:
            parts.append(f"lossy: {self.config.lossy}")
        return f"[{' · '.join(parts)}]"

    def _share_of_limit(self, result: RequestOutput) -> float:
        """Least time of the steps after the first token as a share of the time that they took; 0
        where there were none.

        A measurement that the answer has just beaten was taken on a busy machine, and is taken
        again.
        """
        traced = model_program(self.config, self._checkpoint)
        program = adapted(
            lower_program(self.config.backend, traced, self._checkpoint.tensors), self._matrices
        )
        loads = decode_steps(
            result, number_bytes(program.kv_groups, self.config.kv_dtype), self._beam_width
        )
        if not loads or not result.timing.decode:
            return 0.0
        here = self.config.threads, self.config.backend
        share = decode_seconds(program, hardware.this_machine(*here), loads) / result.timing.decode
        if share > 1:
            hardware.measure(*here)
            share = (
                decode_seconds(program, hardware.this_machine(*here), loads) / result.timing.decode
            )
        return share
