"""How `headrace run` prints the answers to one prompt: as text that comes piece by piece, or as
JSON at the end.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headrace.cli import signals
from headrace.cli.session import Session
from headrace.cli.terminal import say, write
from headrace.outputs import RequestOutput, Update
from headrace.prompts import Message, Prompt
from headrace.sampling_params import SamplingParams

SEPARATOR = "\n---\n"
"""Stands between the answers to one prompt."""


def print_answers(
    session: Session,
    prompt: Prompt | Sequence[Message],
    params: SamplingParams,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Print `params.n` answers on stdout, and on stderr the line with their speed. After Ctrl-C,
    what there is; then raises Ended.
    """
    with signals.held() as stop:
        updates = session.answer(prompt, params, stop)
        if as_json:
            for _ in updates:
                pass
        else:
            for piece in in_order(updates, params.n):
                write(piece)
            write("\n")
        result = session.result
        assert result is not None, "the answer has ended"
        if as_json:
            for record in records(result):
                print(json.dumps(record), flush=True)
    if stop.ended:
        raise stop.ended
    if not (quiet or as_json):
        say(session.closing_line())


def in_order(updates: Iterable[Update], count: int) -> Iterator[str]:
    """The text of answer after answer, as soon as it can be shown: that of later answers waits for
    the end of the earlier ones.
    """
    waiting, ended, current = [""] * count, set(), 0
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
    for text in waiting[current + 1 :]:  # of an answer that was stopped
        yield SEPARATOR + text


def records(result: RequestOutput) -> Iterator[dict[str, Any]]:
    """A record for each answer. Timing is in seconds; it and `drafts` are of the request, which is
    all answers together.
    """
    timing = {name: getattr(result.timing, name) for name in ("queue", "prefill", "decode")}
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
            "drafts": {method: stats._asdict() for method, stats in result.drafts.items()},
        }
