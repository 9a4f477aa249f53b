"""What a chat template needs: its roles, and its forms of content, tools and tool calls.

Templates do not declare it, so small conversations with marked texts are rendered, and their
output is searched. Each question is asked once per template, when a conversation depends on it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from headrace.checkpoint.plain_tools import calls_text, result_text, tools_text
from headrace.checkpoint.template_roles import RoleFolds, text_of

Messages = list[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Tools | None], str]

_CONTENT, _ROLE = "qzcontentqz", "qzroleqz"
_NAME, _KEY, _VALUE = "qznameqz", "qzkeyqz", "qzvalueqz"
_ID = "qzcallid1"
"""Nine letters and digits, which Mistral's templates require."""
_STANDARD_ROLE = {"developer": "system", "function": "tool"}
"""Roles of OpenAI's API, and the role that takes their place in templates without them."""
_MISSING = object()
_ARGUMENTS = {_KEY: _VALUE}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "qz",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}


class _CallForms(NamedTuple):
    content: Any
    """Content next to tool calls: text, None, or `_MISSING` if the key must be absent."""
    objects: bool
    """Whether arguments may be objects."""
    text: bool
    """Whether arguments may be JSON text."""


class Adapted(NamedTuple):
    messages: Messages
    places: list[str]
    """The field of the request that each message was made from."""
    notes: list[str]
    """Changes that the user should know, for the log."""


class TemplateNeeds:
    """The needs of one template. `render` renders messages and tools, and may raise any error."""

    def __init__(self, source: str, render: Render) -> None:
        self._render = render
        self._source = source
        # Only a template with these words reads content parts.
        self._may_read_parts = "text" in source and "type" in source
        self._reads_mappings = "mapping" in source
        self.knows_role = cache(self._knows_role)
        self.reads_parts = cache(self._reads_parts)
        self.call_forms = cache(self._call_forms)
        self._drops_calls = cache(self._find_drops_calls)
        self._ignores_tools = cache(lambda: not self._takes_tools())
        self._takes_results = cache(self._find_takes_results)
        self._takes_thoughts_and_text = cache(self._find_takes_thoughts_and_text)
        self._roles = RoleFolds(self._probe)

    def adapt(
        self,
        messages: Messages,
        places: Sequence[str] = (),
        tools: Tools | None = None,
        describes_tools: bool = False,
    ) -> Adapted:
        """Return the messages in the forms that the template reads.

        If the template knows no tools, and `describes_tools`, a system message describes them.
        """
        with_roles = [self._with_known_role(message) for message in messages]
        places = [*places] or [f"messages[{i}]" for i in range(len(messages))]
        if tools and describes_tools and self._ignores_tools():
            with_roles.insert(0, {"role": "system", "content": tools_text(tools)})
            places.insert(0, "tools")
            if len(with_roles) > 1 and with_roles[1]["role"] == "system":
                # The user's own instructions come first.
                own = with_roles.pop(1)
                places.pop(0)
                texts = [text_of(own.get("content")), with_roles[0]["content"]]
                with_roles[0] = own | {"content": "\n\n".join(filter(None, texts))}
        folded, places, notes = self._roles.fold(with_roles, places)
        for message, place in zip(folded, places, strict=True):
            if _has_thoughts_and_text(message) and not self._takes_thoughts_and_text():
                _join_text_to_thoughts(message)
                notes.append(
                    "the chat template takes reasoning or content before a call, not both, so that "
                    f"the reasoning of {place} got its content"
                )
        return Adapted([self._adapt(message) for message in folded], places, notes)

    def _with_known_role(self, message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        role = message.get("role")
        if role in _STANDARD_ROLE and not self.knows_role(role):
            role = message["role"] = _STANDARD_ROLE[role]
        if "tool_calls" in message and self._drops_calls():
            # The template drops calls, so that the model would not know that it made them.
            calls = calls_text(message.pop("tool_calls"))
            text = text_of(message.get("content"))
            message["content"] = f"{text}\n{calls}" if text else calls
        if role == "tool" and not self._takes_results():
            content = message.get("content")
            text = _json(content) if isinstance(content, dict) else text_of(content)
            message |= {"role": "user", "content": result_text(text)}
        return message

    def _adapt(self, message: dict[str, Any]) -> dict[str, Any]:
        role = message.get("role")
        if "tool_calls" in message:
            self._adapt_tool_calls(message)
        content = message.get("content")
        if isinstance(content, list):
            if not self.reads_parts(role, False):
                message["content"] = "\n".join(part["text"] for part in content)
        elif isinstance(content, dict):
            if not self._reads_mappings:
                message["content"] = _json(content)
        elif isinstance(content, str) and self._may_read_parts and self.reads_parts(role, True):
            message["content"] = [{"type": "text", "text": content}]
        return message

    def _adapt_tool_calls(self, message: dict[str, Any]) -> None:
        content = message.pop("content", _MISSING)
        forms = self.call_forms(content if content in (_MISSING, "") else _CONTENT)
        if content in (_MISSING, ""):
            content = forms.content
        if content is not _MISSING:
            message["content"] = content

        calls = []
        for call in message["tool_calls"]:
            function = dict(call["function"])
            arguments = function["arguments"]
            if isinstance(arguments, str) and forms.objects and not forms.text:
                function["arguments"] = json.loads(arguments)
            elif isinstance(arguments, dict) and forms.text and not forms.objects:
                function["arguments"] = _json(arguments)
            calls.append(call | {"function": function})
        message["tool_calls"] = calls

    def _probe(self, messages: Messages, tools: Tools | None = None) -> str:
        """Render; empty if the template refuses the messages."""
        try:
            return self._render(messages, tools)
        except MemoryError:
            raise
        except Exception:
            return ""

    def _knows_role(self, role: str) -> bool:
        known, unknown = (
            self._probe(_conversation(name, _CONTENT, _STANDARD_ROLE[role]))
            for name in (role, _ROLE)
        )
        return _CONTENT in known and known != unknown.replace(_ROLE, role)

    def _reads_parts(self, role: str, only: bool) -> bool:
        """Whether the template reads content parts; `only`: and does not read plain text."""
        if not self._may_read_parts:
            return False
        as_text = self._probe(_conversation(role, _CONTENT, role))
        as_parts = self._probe(_conversation(role, [{"type": "text", "text": _CONTENT}], role))
        if _CONTENT in as_text:
            return not only and as_parts == as_text
        # A printed list contains the names of its keys.
        return _CONTENT in as_parts and "'type'" not in as_parts and '"type"' not in as_parts

    def _takes_tools(self) -> bool:
        """Whether the template renders tools, or calls of tools."""
        if not self._drops_calls():
            return True
        if "tools" not in self._source:
            return False
        user = [{"role": "user", "content": "qz"}]
        without = self._probe(user)
        return not without or self._probe(user, [_TOOL]) != without

    def _find_drops_calls(self) -> bool:
        """Whether the template renders an assistant's text, and no part of its calls."""
        rendered = "".join(
            self._probe(_calls(content, arguments))
            for content in ("", None, _MISSING)
            for arguments in (_ARGUMENTS, _json(_ARGUMENTS))
        )
        return bool(rendered) and not any(text in rendered for text in (_NAME, _KEY, _VALUE))

    def _find_takes_results(self) -> bool:
        """Whether the template renders results of tools, or no user's message either."""
        if _CONTENT not in self._probe(_conversation("user", _CONTENT, "user")):
            return True
        forms = self.call_forms("")
        arguments = _ARGUMENTS if forms.objects or not forms.text else _json(_ARGUMENTS)
        calls = _calls(forms.content, arguments)
        result = {"role": "tool", "content": _CONTENT, "tool_call_id": _ID, "name": _NAME}
        return _CONTENT in self._probe([*calls, result])

    def _find_takes_thoughts_and_text(self) -> bool:
        """Whether a call may follow reasoning and content, or may not follow content either."""
        forms = self.call_forms(_CONTENT)
        arguments = _ARGUMENTS if forms.objects or not forms.text else _json(_ARGUMENTS)
        user, call = _calls(_CONTENT, arguments)
        thoughts = {"reasoning_content": "qz", "thinking": "qz"}
        return bool(self._probe([user, call | thoughts])) or not self._probe([user, call])

    def _call_forms(self, content: Any) -> _CallForms:
        """Find forms with which a call is rendered, next to `content` if it is text."""
        for form in {_MISSING: (_MISSING, None, ""), "": ("", _MISSING, None)}.get(
            content, (content,)
        ):
            as_object = self._probe(_calls(form, _ARGUMENTS))
            as_text = self._probe(_calls(form, json.dumps(_ARGUMENTS)))
            forms = _CallForms(
                form,
                _NAME in as_object and _VALUE in as_object and f"'{_KEY}':" not in as_object,
                _NAME in as_text and json.dumps(_ARGUMENTS) in as_text,
            )
            prints_none = form is None and "None" in as_object + as_text
            if (forms.objects or forms.text) and not prints_none:
                return forms
        return _CallForms("" if content is _MISSING else content, False, False)


def _has_thoughts_and_text(message: dict[str, Any]) -> bool:
    return all(message.get(name) for name in ("tool_calls", "reasoning_content", "content"))


def _join_text_to_thoughts(message: dict[str, Any]) -> None:
    text = f"{message['reasoning_content']}\n\n{text_of(message.pop('content'))}"
    message["reasoning_content"] = message["thinking"] = text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _calls(content: Any, arguments: Any) -> Messages:
    function = {"name": _NAME, "arguments": arguments}
    call: dict[str, Any] = {
        "role": "assistant",
        "tool_calls": [{"id": _ID, "type": "function", "function": function}],
    }
    if content is not _MISSING:
        call["content"] = content
    return [{"role": "user", "content": "qz"}, call]


def _conversation(role: str, content: Any, place: str) -> Messages:
    """Make a conversation with a message of `role` in the place of another role."""
    message = {"role": role, "content": content}
    user = {"role": "user", "content": "qz"}
    if place == "system":
        return [message, user]
    if place == "assistant":
        return [user, message]
    if place == "tool":
        call = _calls("", _ARGUMENTS)
        return [*call, message | {"tool_call_id": _ID, "name": _NAME}]
    return [message]
