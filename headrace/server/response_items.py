"""The output of a response as a list of items, and the events by which it grows."""

from collections.abc import AsyncIterator, Iterator
from time import time
from typing import Any
from uuid import uuid4

from headrace.request import SamplingParams
from headrace.server.conversation import Answer
from headrace.server.output_parsers.deltas import (
    CallArguments,
    CallBegun,
    Content,
    Delta,
    Reasoning,
)
from headrace.server.responses_records import ResponsesRequest

Event = tuple[str, dict[str, Any]]
"""Its name, and its fields but for its number."""

_KINDS = {"message": "output_text", "reasoning": "reasoning_text"}
"""The type of the one part that an item of text has, by the type of the item."""


class ResponseItems:
    """One response, as far as it has come."""

    def __init__(self, asked: ResponsesRequest, answer: Answer, params: SamplingParams) -> None:
        self._asked = asked
        self._answer = answer
        self._params = params
        self._head = {"id": f"resp_{uuid4().hex}", "object": "response", "created_at": int(time())}
        self._items: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []
        self._status = "in_progress"

    async def events(self) -> AsyncIterator[Event]:
        """All events up to the end of the response. Raises what it failed of."""
        yield "response.created", {"response": self.response()}
        yield "response.in_progress", {"response": self.response()}
        async for piece in self._answer.pieces():
            for delta in piece.deltas:
                for event in self._add(delta):
                    yield event
            if piece.finish_reason:
                self._status = "incomplete" if piece.finish_reason == "length" else "completed"
        for event in self._close():
            yield event
        yield f"response.{self._status}", {"response": self.response()}

    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        asked, usage = self._asked, self._answer.usage
        ended = self._status != "in_progress"
        return self._head | {
            "status": self._status,
            "model": self._answer.model,
            "output": self._items if ended else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if self._status == "incomplete"
            else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": asked.reasoning.effort if asked.reasoning else None,
                "summary": None,
            },
            "store": False,
            "temperature": self._params.temperature,
            "top_p": self._params.top_p,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "truncation": "disabled",
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            }
            if ended
            else None,
        }

    def _add(self, delta: Delta) -> Iterator[Event]:
        """Add a delta to the last item, or to a new one."""
        last = self._items[-1]["type"] if self._items else ""
        match delta:
            case CallBegun():
                yield from self._open(
                    "function_call",
                    "fc",
                    {"call_id": delta.id, "name": delta.name, "arguments": ""},
                )
                return
            case Content() if last != "message":
                yield from self._open("message", "msg", {"role": "assistant", "content": []})
            case Reasoning() if last != "reasoning":
                yield from self._open("reasoning", "rs", {"summary": [], "content": []})
        self._texts[-1].append(delta.text)
        if isinstance(delta, CallArguments):
            yield "response.function_call_arguments.delta", self._place() | {"delta": delta.text}
        else:
            kind = _KINDS[self._items[-1]["type"]]
            scores: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
            yield (
                f"response.{kind}.delta",
                self._place() | {"content_index": 0, "delta": delta.text} | scores,
            )

    def _open(self, kind: str, prefix: str, fields: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._items.append(
            {"type": kind, "id": f"{prefix}_{uuid4().hex}", "status": "in_progress", **fields}
        )
        self._texts.append([])
        yield (
            "response.output_item.added",
            {"output_index": len(self._items) - 1, "item": dict(self._items[-1])},
        )
        if kind in _KINDS:
            yield (
                "response.content_part.added",
                self._place() | {"content_index": 0, "part": _part(_KINDS[kind], "")},
            )

    def _close(self) -> Iterator[Event]:
        """The last item is whole, if there is one."""
        if not self._items:
            return
        item, text, place = self._items[-1], "".join(self._texts[-1]), self._place()
        item["status"] = "incomplete" if self._status == "incomplete" else "completed"
        if kind := _KINDS.get(item["type"]):
            part = _part(kind, text)
            item["content"] = [part]
            yield (
                f"response.{kind}.done",
                place
                | {"content_index": 0, "text": text}
                | ({"logprobs": []} if kind == "output_text" else {}),
            )
            yield "response.content_part.done", place | {"content_index": 0, "part": part}
        else:
            item["arguments"] = text
            yield (
                "response.function_call_arguments.done",
                place | {"name": item["name"], "arguments": text},
            )
        yield "response.output_item.done", {"output_index": len(self._items) - 1, "item": item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text} | (
        {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    )
