"""A loaded model for `headrace run`, which generates one response at a time."""

import atexit
import gc
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Unpack

from headrace.backend import lower_program
from headrace.checkpoint.source import resolve
from headrace.cli.signals import Stop
from headrace.config import EngineConfig
from headrace.loader.drafts import model_program
from headrace.loader.load import load_model
from headrace.outputs import RequestOutput, Update
from headrace.planner import hardware
from headrace.planner.decode_steps import decode_seconds, decode_steps
from headrace.program.adapter import Adapter, adapted
from headrace.program.kv import number_bytes
from headrace.prompts import Message, Prompt, TextOptions
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams


class Session:
    """One loaded model. Use it in a `with` block."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        adapter: tuple[str, str] | None = None,
        *,
        sanitize_control_tokens: bool = True,
        **text_options: Unpack[TextOptions],
    ) -> None:
        self._text_options = text_options
        self._sanitizes = sanitize_control_tokens
        self._engine, self._prompts, _, self._checkpoint = load_model(model, config)
        self.config = self._engine.config
        # All objects of the model stay, so the collector need not visit them, at exit either.
        gc.freeze()
        if self.config.traits.on_gpu:
            # Frozen objects of torch and Triton would look like leaks of the native module.
            atexit.register(gc.unfreeze)

        self.result: RequestOutput | None = None
        self._beam_width: int | None = None
        self._adapter_name = adapter[0] if adapter else None
        self._adapter: Adapter = {}
        if adapter:
            from headrace.checkpoint.adapter import read_adapter

            try:
                self._adapter = read_adapter(resolve(adapter[1]), self._checkpoint.spec)
                self._engine.load_adapter(adapter[0], self._adapter)
            except BaseException:
                self.__exit__(None, None, None)
                raise

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

    def generate(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams, stop: Stop
    ) -> Iterator[Update]:
        """Generate a response and set `result`; `stop` ends it.

        Raises RequestError if the prompt exceeds the context, and the error of a failed
        request.
        """
        token_ids, text = self._prompts.read(
            prompt, sanitize_control_tokens=self._sanitizes, **self._text_options
        )
        request_id = self._engine.add_request(
            token_ids, params, RequestOptions(adapter=self._adapter_name), prompt=text
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
        """Tokens and speed of the last response, and its limit on this machine."""
        result = self.result
        if result is None:
            return ""
        parts = [self._prompt_figures(result)]
        num_out = sum(len(output.token_ids) for output in result.outputs)
        if share := self._share_of_limit(result):
            # The first token of each response comes from a prefill step.
            num_decoded = num_out - len(result.outputs)
            speed = num_decoded / result.timing.output
            parts.append(f"{num_out:,} out, {speed:,.0f} tok/s")
            parts.append(f"limit {speed / share:,.0f} tok/s, {100 * share:.0f} %")
        else:
            parts.append(f"{num_out:,} out")
        if accepted := sum(stats.accepted for stats in result.drafts.values()):
            parts.append(f"{accepted:,} accepted from drafts")
        if self._engine.lossy:
            parts.append(f"lossy: {self._engine.lossy}")
        return f"[{' · '.join(parts)}]"

    def _prompt_figures(self, result: RequestOutput) -> str:
        num_in = len(result.prompt_token_ids)
        num_computed = num_in - result.cached_tokens
        text = f"{num_in:,} in"
        if result.cached_tokens:
            text += f", {result.cached_tokens:,} cached"
        if num_computed > 0 and result.timing.prefill > 0:
            text += f", {num_computed / result.timing.prefill:,.0f} tok/s"
        return text

    def _share_of_limit(self, result: RequestOutput) -> float:
        config = self.config
        traced = model_program(config, self._checkpoint)
        lowered = lower_program(config.backend, traced, self._checkpoint.tensors)
        program = adapted(lowered, self._adapter)
        kv_bytes = number_bytes(program.kv_groups, config.kv_format)
        steps = decode_steps(result, kv_bytes, self._beam_width)
        if not steps or not result.timing.output:
            return 0.0

        def share() -> float:
            machine = hardware.this_machine(config.threads, config.backend)
            return decode_seconds(program, machine, steps) / result.timing.output

        first = share()
        if first <= 1:
            return first
        # The response was faster than the limit, so the machine was busy when it was measured.
        hardware.measure(config.threads, config.backend)
        return share()
