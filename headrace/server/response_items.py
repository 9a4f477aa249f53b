"""The output items of the Responses API, and their events."""

from collections.abc import AsyncIterator, Iterator, Sequence
from time import time
from typing import Any
from uuid import uuid4

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.outputs import Logprobs
from headrace.sampling_params import SamplingParams
from headrace.server.conversation import Generation
from headrace.server.logprobs import LogprobWriter
from headrace.server.output_parsers.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from headrace.server.responses_input import custom_input, read_response_tools
from headrace.server.responses_records import ResponsesRequest

Event = tuple[str, dict[str, Any]]

_PART_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseItems:
    def __init__(
        self,
        request: ResponsesRequest,
        generation: Generation,
        params: SamplingParams,
        tokenizer: Tokenizer,
    ) -> None:
        self._writer = LogprobWriter(
            tokenizer, request.num_logprobs or 0, named=request.logprob_token_ids
        )
        self._new_scores: list[Logprobs] = []
        """Scores of tokens whose text has not come yet."""
        self._scores: list[dict[str, Any]] = []
        """Scores of the last item's tokens."""
        self._tools = read_response_tools(request.tools)
        self._request = request
        self._generation = generation
        self._params = params
        self._head = {"id": f"resp_{uuid4().hex}", "object": "response", "created_at": int(time())}
        self._items: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []
        self._status = "in_progress"

    async def events(self) -> AsyncIterator[Event]:
        yield "response.created", {"response": self.response()}
        yield "response.in_progress", {"response": self.response()}
        async for chunk in self._generation.chunks():
            self._new_scores += chunk.logprobs
            for delta in chunk.deltas:
                for event in self._add(delta):
                    yield event
            if chunk.finish_reason:
                self._status = "incomplete" if chunk.finish_reason == "length" else "completed"
        if not self._items:
            # Clients read the last item, so there is always one.
            for event in self._open_message():
                yield event
        for event in self._close():
            yield event
        yield f"response.{self._status}", {"response": self.response()}

    def response(self) -> dict[str, Any]:
        request = self._request
        ended = self._status != "in_progress"
        incomplete = self._status == "incomplete"
        effort = request.reasoning.effort if request.reasoning else None
        return self._head | {
            "status": self._status,
            "model": self._generation.model,
            "output": self._items if ended else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "temperature": self._params.temperature,
            "top_p": self._params.top_p,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _add(self, delta: Delta) -> Iterator[Event]:
        last_type = self._items[-1]["type"] if self._items else ""
        match delta:
            case ToolCallStart():
                yield from self._open_call(delta)
                return
            case Content() if last_type != "message":
                yield from self._open_message()
            case Reasoning() if last_type != "reasoning":
                yield from self._open("reasoning", "rs", {"summary": [], "content": []})

        self._texts[-1].append(delta.text)
        scores = self._writer.chat(self._new_scores)
        self._new_scores.clear()
        if isinstance(delta, ToolCallArguments):
            if self._items[-1]["type"] == "custom_tool_call":
                return  # the input is known when its JSON ends
            fields = self._place() | {"delta": delta.text}
            yield "response.function_call_arguments.delta", fields
            return
        part_type = _PART_TYPES[self._items[-1]["type"]]
        self._scores += scores
        fields = self._place() | {"content_index": 0, "delta": delta.text}
        yield f"response.{part_type}.delta", fields | _text_scores(part_type, scores)

    def _open_message(self) -> Iterator[Event]:
        yield from self._open("message", "msg", {"role": "assistant", "content": []})

    def _open_call(self, start: ToolCallStart) -> Iterator[Event]:
        fields = {"call_id": start.id, "name": start.name}
        tool = self._tools.get(start.name)
        if tool and tool.namespace:
            fields |= {"name": tool.name, "namespace": tool.namespace}
        if tool and tool.is_custom:
            yield from self._open("custom_tool_call", "ctc", fields | {"input": ""})
        else:
            yield from self._open("function_call", "fc", fields | {"arguments": ""})

    def _open(self, item_type: str, id_prefix: str, fields: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        item_id = f"{id_prefix}_{uuid4().hex}"
        item = {"type": item_type, "id": item_id, "status": "in_progress", **fields}
        self._items.append(item)
        self._texts.append([])
        self._scores = []
        added = {"output_index": len(self._items) - 1, "item": dict(item)}
        yield "response.output_item.added", added
        if item_type in _PART_TYPES:
            part = {"content_index": 0, "part": _part(_PART_TYPES[item_type], "")}
            yield "response.content_part.added", self._place() | part

    def _close(self) -> Iterator[Event]:
        if not self._items:
            return
        item, text, place = self._items[-1], "".join(self._texts[-1]), self._place()
        item["status"] = "incomplete" if self._status == "incomplete" else "completed"
        if part_type := _PART_TYPES.get(item["type"]):
            part = _part(part_type, text, self._scores)
            item["content"] = [part]
            fields = place | {"content_index": 0, "text": text}
            fields |= _text_scores(part_type, self._scores)
            yield f"response.{part_type}.done", fields
            yield "response.content_part.done", place | {"content_index": 0, "part": part}
        elif item["type"] == "custom_tool_call":
            item["input"] = text = custom_input(text)
            yield "response.custom_tool_call_input.delta", place | {"delta": text}
            yield "response.custom_tool_call_input.done", place | {"input": text}
        else:
            item["arguments"] = text
            fields = place | {"name": item["name"], "arguments": text}
            yield "response.function_call_arguments.done", fields
        yield "response.output_item.done", {"output_index": len(self._items) - 1, "item": item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}


def _part(part_type: str, text: str, scores: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    part: dict[str, Any] = {"type": part_type, "text": text}
    if part_type == "output_text":
        part |= {"annotations": [], "logprobs": list(scores)}
    return part


def _text_scores(part_type: str, scores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"logprobs": list(scores)} if part_type == "output_text" else {}
