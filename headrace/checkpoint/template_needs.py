"""What a chat template needs: its roles, and its forms of content and of tool calls.

Templates do not declare it, so small conversations with marked texts are rendered, and their
output is searched. Each question is asked once per template, when a conversation depends on it.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

Messages = list[dict[str, Any]]
Render = Callable[[Messages], str]

_CONTENT, _ROLE = "qzcontentqz", "qzroleqz"
_NAME, _KEY, _VALUE = "qznameqz", "qzkeyqz", "qzvalueqz"
_ID = "qzcallid1"
"""Nine letters and digits, which Mistral's templates require."""
_STANDARD_ROLE = {"developer": "system", "function": "tool"}
"""Roles of OpenAI's API, and the role that takes their place in templates without them."""
_MISSING = object()
_ARGUMENTS = {_KEY: _VALUE}


class _CallForms(NamedTuple):
    content: Any
    """Content next to tool calls: text, None, or `_MISSING` if the key must be absent."""
    objects: bool
    """Whether arguments may be objects."""
    text: bool
    """Whether arguments may be JSON text."""


class TemplateNeeds:
    """The needs of one template. `render` renders messages, and may raise any error."""

    def __init__(self, source: str, render: Render) -> None:
        self._render = render
        # Only a template with these words reads content parts.
        self._may_read_parts = "text" in source and "type" in source
        self._reads_mappings = "mapping" in source
        self.knows_role = cache(self._knows_role)
        self.reads_parts = cache(self._reads_parts)
        self.call_forms = cache(self._call_forms)

    def adapt(self, messages: Messages) -> Messages:
        """Return the messages in the forms that the template reads."""
        return [self._adapt(message) for message in messages]

    def _adapt(self, message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        role = message.get("role")
        if role in _STANDARD_ROLE and not self.knows_role(role):
            role = message["role"] = _STANDARD_ROLE[role]
        if "tool_calls" in message:
            self._adapt_tool_calls(message)
        content = message.get("content")
        if isinstance(content, list):
            if not self.reads_parts(role, False):
                message["content"] = "\n".join(part["text"] for part in content)
        elif isinstance(content, dict):
            if not self._reads_mappings:
                message["content"] = json.dumps(content, ensure_ascii=False)
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
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            calls.append(call | {"function": function})
        message["tool_calls"] = calls

    def _probe(self, messages: Messages) -> str:
        """Render; empty if the template refuses the messages."""
        try:
            return self._render(messages)
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
