"""The responses to one prompt of `headrace run`: text as it is generated, or JSON at the end."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from headrace.cli import signals
from headrace.cli.session import Session
from headrace.cli.terminal import print_stderr, write_stdout
from headrace.outputs import RequestOutput, Update
from headrace.prompts import Message, Prompt
from headrace.sampling_params import SamplingParams

SEPARATOR = "\n---\n"


def print_responses(
    session: Session,
    prompt: Prompt | Sequence[Message],
    params: SamplingParams,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Print `params.n` responses on stdout, and the closing line on stderr.

    Raises Ended after a signal.
    """
    with signals.deferred() as stop:
        updates = session.generate(prompt, params, stop)
        if as_json:
            for _ in updates:
                pass
        else:
            for text in in_order(updates, params.n):
                write_stdout(text)
            write_stdout("\n")
        result = session.result
        assert result is not None, "the request has ended"
        if as_json:
            for record in response_records(result):
                print(json.dumps(record), flush=True)
    if stop.ended:
        raise stop.ended
    if not (quiet or as_json):
        print_stderr(session.closing_line())


def in_order(updates: Iterable[Update], count: int) -> Iterator[str]:
    waiting = [""] * count
    ended: set[int] = set()
    current = 0
    for update in updates:
        waiting[update.index] += update.text
        if update.finish_reason:
            ended.add(update.index)
        while current < count:
            if waiting[current]:
                yield waiting[current]
                waiting[current] = ""
            if current not in ended or current == count - 1:
                break
            yield SEPARATOR
            current += 1

    # A signal has stopped the request before its first responses ended.
    for text in waiting[current + 1 :]:
        yield SEPARATOR + text


def response_records(result: RequestOutput) -> Iterator[dict[str, Any]]:
    """Yield a JSON object per response. `timing` (seconds) and `drafts` belong to the request."""
    timing = asdict(result.timing)
    drafts = {method: stats._asdict() for method, stats in result.drafts.items()}
    for output in result.outputs:
        yield {
            "index": output.index,
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "usage": {
                "prompt_tokens": len(result.prompt_token_ids),
                "cached_tokens": result.cached_tokens,
                "completion_tokens": len(output.token_ids),
            },
            "timing": timing,
            "drafts": drafts,
        }
