"""Ends an output of demanded tool calls at the token that completes a repeated call."""

import msgspec

from headrace.checkpoint.tokenizer import Detokeniser
from headrace.remote import frames
from headrace.server.output_parsers.parser import OutputParser


class RepeatedCalls:
    """Cuts one output. The cut depends on the tokens alone, not on the steps that they came in."""

    def __init__(self, parser: OutputParser, decoder: Detokeniser) -> None:
        """`parser` is of this object alone; `decoder` gives the text of each token."""
        self._parser = parser
        self._decoder = decoder
        self._held = ""
        """Text of earlier tokens that has not come: the engine holds it for stop strings."""

    def cut(self, output: frames.StepOutput) -> frames.StepOutput:
        """Return the output up to a repeated call, which ends it; all of it without one."""
        num_read = len(output.token_ids) - bool(output.finish_reason)  # the last one ends it anyway
        for count, token in enumerate(output.token_ids[:num_read], 1):
            piece = self._decoder.push(token)
            self._held += piece
            self._parser.push(piece)
            if self._parser.has_repeated:
                return msgspec.structs.replace(
                    output,
                    text=self._held,
                    token_ids=output.token_ids[:count],
                    logprobs=output.logprobs[:count],
                    finish_reason="stop",
                    stop_reason=None,
                )
        self._held = self._held[len(output.text) :]
        return output
