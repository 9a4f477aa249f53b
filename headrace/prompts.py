"""Turns prompts, which are text, token ids or conversations, into token ids."""

import reprlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypedDict, TypeGuard, Unpack

from headrace.checkpoint.named_tokens import NamedTokens
from headrace.checkpoint.templates import Renderer, Rendering
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.errors import RequestError
from headrace.messages import is_message, normalise_messages, note_mended, plain
from headrace.validation import check_names

Prompt = str | Mapping[str, Any]
"""Text, `{"prompt": text}`, or `{"prompt_token_ids": [...]}` with an optional `"prompt"` text."""
Message = Any
"""`{"role": ..., "content": ...}`, as a dictionary, a dataclass or a Pydantic model"""


class ChatOptions(TypedDict, total=False):
    """Inputs of a chat template besides the messages."""

    tools: Sequence[Mapping[str, Any]] | None
    """JSON descriptions of functions that the model may call."""
    documents: Sequence[Mapping[str, Any]] | None
    """Source texts for the response, usually with the keys `title` and `text`."""
    add_generation_prompt: bool
    """Whether the prompt ends with the header of a response (default), or with the last message."""
    continue_final_message: bool
    """Whether the response continues the last message, instead of following it."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Additional variables of the template, such as `enable_thinking`."""


class TextOptions(TypedDict, total=False):
    """How a text prompt becomes tokens. Conversations and token ids take none of these options."""

    add_special_tokens: bool
    """Whether to add the model's special tokens, usually BOS (default). A text that begins with BOS
    gets no second one."""
    parse_special: bool
    """Whether the names of control tokens in the text become these tokens (default). Text that may
    be hostile should keep them as text: pass False."""


class PromptOptions(ChatOptions, TextOptions, total=False):
    """Options of a call that takes a text prompt or a conversation."""


class TokenizedPrompt(NamedTuple):
    """A prompt as token ids. `Engine.check` validates ids that come from a caller."""

    token_ids: Sequence[int]
    text: str | None
    """Text that was tokenised, or that the caller passed next to the token ids."""


class PromptReader:
    """Tokenises the prompts of one model. May be used from several threads.

    Text gets the model's first tokens (usually BOS), and names of control tokens in it become
    these tokens; both can be switched off. A rendered chat template contains its own BOS.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        chat_template: str | None,
        renderer: Renderer,
        max_model_len: int,
        tool_template: str | None = None,
        other_templates: Mapping[str, str] | None = None,
        named_tokens: NamedTokens | None = None,
    ) -> None:
        """Make a reader.

        `max_model_len` is the context in tokens. `tool_template` replaces
        `chat_template` for conversations with tools, if the model has one;
        conversations choose `other_templates` by name. `named_tokens` are BOS and EOS
        by default.
        """
        self._model = model
        self._tokenizer = tokenizer
        named = {"default": chat_template, "tool_use": tool_template, **(other_templates or {})}
        self.templates = {name: text for name, text in named.items() if text is not None}
        self._named_tokens = named_tokens or {
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
        }
        self._renderer = renderer
        self.max_model_len = max_model_len
        self.describes_tools = True
        """Whether a system message describes tools that the template does not know."""

    def close(self) -> None:
        """End the process that renders conversations. Text prompts can still be read."""
        self._renderer.close()

    def read(
        self,
        prompt: Prompt | Sequence[Message],
        *,
        sanitize_control_tokens: bool = True,
        **text_options: Unpack[TextOptions],
    ) -> TokenizedPrompt:
        """Read a prompt with `read_prompt`, or a conversation with `read_chat`."""
        if isinstance(prompt, str | Mapping):
            return self.read_prompt(prompt, **text_options)
        return self.read_chat(prompt, sanitize_control_tokens=sanitize_control_tokens)

    def encode_continuation(self, text: str) -> list[int]:
        """Return the token ids of text that continues other text, as `read_prompt` does."""
        return list(self.read_prompt(text, add_special_tokens=False).token_ids)

    def decode_continuation(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens that continue other tokens."""
        decoder = self._tokenizer.decoder(continues=True)
        return "".join(map(decoder.push, token_ids)) + decoder.flush()

    def read_prompt(
        self, prompt: Prompt, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> TokenizedPrompt:
        """Read text or a dictionary. `TextOptions` explains the options.

        Raises RequestError if the prompt has another type, is empty, or cannot fit in
        the context.
        """
        for name, value in (
            ("add_special_tokens", add_special_tokens),
            ("parse_special", parse_special),
        ):
            if not isinstance(value, bool):
                raise RequestError(f"{name} must be true or false, not {reprlib.repr(value)}")
        if isinstance(prompt, str):
            return self._tokenize(prompt, add_special_tokens, parse_special)
        if not isinstance(prompt, Mapping):
            raise RequestError(
                f"a prompt must be text or a dictionary, not {type(prompt).__name__}: "
                "pass token ids as {'prompt_token_ids': [...]}"
            )
        check_names("key of a prompt", prompt, ("prompt", "prompt_token_ids"))
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"a prompt must be text, not {type(text).__name__}")
        if "prompt_token_ids" in prompt:
            return TokenizedPrompt(prompt["prompt_token_ids"], text)
        return self._tokenize(text or "", add_special_tokens, parse_special)

    def read_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        sanitize_control_tokens: bool = True,
        places: Sequence[str] | None = None,
    ) -> TokenizedPrompt:
        """Render a conversation with the model's chat template, and tokenise it.

        `ChatOptions` explains the options. With `continue_final_message` the prompt
        ends after the content of the last message. `places` names the messages in
        errors; the default is `messages[0]` and so on. Raises RequestError if the model has
        no chat template, the messages are malformed, the template cannot render them,
        or the text cannot fit in the context; FormatError if the template itself is
        invalid or unsafe.
        """
        template = self._choose_template(chat_template, has_tools=tools is not None)
        if not is_conversation(messages):
            raise RequestError(
                "a conversation must be a list of messages, each with a role and content"
            )
        if not isinstance(sanitize_control_tokens, bool):
            raise RequestError(
                "sanitize_control_tokens must be true or false, not "
                f"{reprlib.repr(sanitize_control_tokens)}"
            )
        conversation = normalise_messages(messages, places)
        values = {
            "tools": _with_parameters(_plain_list(tools, "tools")),
            "documents": _plain_list(documents, "documents"),
            "chat_template_kwargs": chat_template_kwargs,
        }
        rendering = self._renderer.render(
            template,
            conversation,
            named_tokens=self._named_tokens,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            traces=sanitize_control_tokens,
            continues=continue_final_message,
            places=places,
            describes_tools=self.describes_tools,
            **values,
        )
        for note in rendering.notes:
            note_mended(note)
        text = rendering.text
        if continue_final_message:
            end = rendering.end
            text = _cut_after_content(text, conversation[-1]) if end is None else text[:end]
        self._check_size(text)
        if sanitize_control_tokens:
            values["messages"] = conversation
            return TokenizedPrompt(self._encode_rendering(text, rendering, values), text)
        return TokenizedPrompt(self._tokenizer.encode(text, add_special=False), text)

    def _encode_rendering(self, text: str, rendering: Rendering, values: object) -> list[int]:
        """Encode a text in which the control tokens that values contain stay text."""
        inserted, unknown = _Spans(rendering.inserted), _Spans(rendering.unknown)

        def is_text(start: int, end: int) -> bool:
            return inserted.touch(start, end) or (
                unknown.touch(start, end) and _contains(values, text[start:end])
            )

        tokens, has_text = self._tokenizer.control_tokens(text, is_text)
        if not has_text:
            return self._tokenizer.encode(text, add_special=False)
        segments = []
        start = 0
        for token_start, token_end in tokens:
            segments.append((text[start:token_start], False))
            segments.append((text[token_start:token_end], True))
            start = token_end
        return self._tokenizer.encode_segments([*segments, (text[start:], False)])

    def _choose_template(self, chosen: str | None, has_tools: bool) -> str:
        templates = self.templates
        if chosen is not None and not isinstance(chosen, str):
            raise RequestError(f"chat_template must be text, not {type(chosen).__name__}")
        if chosen is not None and ("{{" in chosen or "{%" in chosen):
            return chosen
        names = ["tool_use", "default"] if has_tools else ["default"]
        for name in names if chosen is None else [chosen]:
            if name in templates:
                return templates[name]
        if not templates:
            raise RequestError(
                f"{self._model} has no chat template, so it cannot read a conversation; "
                "use plain text, with LLM.generate or headrace run --raw"
            )
        fault = "is missing" if chosen is None else f"{chosen[:80]!r} is unknown"
        raise RequestError(f"chat_template {fault}; {self._model} has {', '.join(templates)}")

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> TokenizedPrompt:
        self._check_size(text)
        ids = self._tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
        bos_id = self._tokenizer.bos_id
        if add_special and ids[:2] == [bos_id] * 2 and self._tokenizer.prefix_ids == (bos_id,):
            # The text is a rendered conversation, which begins with its own BOS.
            del ids[0]
        return TokenizedPrompt(ids, text)

    def _check_size(self, text: str) -> None:
        context = self.max_model_len
        size = len(text.encode(errors="surrogatepass"))
        if not size:
            raise RequestError("the prompt is empty; give at least one token")
        # Reject a text that cannot fit before tokenising it, which takes time in its length.
        if size > context and size > context * self._max_token_bytes:
            raise RequestError(
                f"the prompt has {size:,} bytes, more than a context of {context:,} tokens can "
                "hold; shorten it"
            )

    @cached_property
    def _max_token_bytes(self) -> int:
        vocabulary = range(self._tokenizer.vocab_size)
        return max(len(self._tokenizer.token_bytes(token)) for token in vocabulary)


def _cut_after_content(text: str, message: Message) -> str:
    """Cut a rendered conversation after the content of its last message.

    Raises RequestError if the text does not contain that content literally.
    """
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    content = content.strip() if isinstance(content, str) else ""
    start = text.rfind(content) if content else -1
    if start < 0:
        raise RequestError(
            "continue_final_message needs a last message whose text the chat template copies "
            "unchanged"
        )
    return text[: start + len(content)]


class _Spans:
    """Sorted spans of characters that do not overlap."""

    def __init__(self, spans: Sequence[Sequence[int]]) -> None:
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]

    def touch(self, start: int, end: int) -> bool:
        """Return whether a span has characters from `start` to before `end`."""
        i = bisect_right(self._ends, start)
        return i < len(self._starts) and self._starts[i] < end


def _contains(value: object, text: str) -> bool:
    """Return whether a JSON value has `text` in a text or a key."""
    if isinstance(value, str):
        return text in value
    if isinstance(value, Mapping):
        return any(_contains(item, text) for pair in value.items() for item in pair)
    return isinstance(value, Sequence) and any(_contains(item, text) for item in value)


def _plain_list(value: Any, field: str) -> Any:
    """Convert a list of objects; the renderer refuses other values."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return plain(value, field) if is_list else value


def _with_parameters(tools: Any) -> Any:
    """Give functions without parameters an empty schema, as transformers' `get_json_schema`.

    Templates read `parameters.properties`, and OpenAI's API says that parameters may be missing.
    """
    if not isinstance(tools, list):
        return tools
    return [
        tool | {"function": function | {"parameters": {"type": "object", "properties": {}}}}
        if isinstance(tool, dict)
        and isinstance(function := tool.get("function"), dict)
        and not function.get("parameters")
        else tool
        for tool in tools
    ]


def is_conversation(messages: object) -> TypeGuard[Sequence[Message]]:
    """Return whether the value is a list of messages that is not empty."""
    return isinstance(messages, Sequence) and bool(messages) and all(map(is_message, messages))
