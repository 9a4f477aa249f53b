"""Prompts in every form that a caller may give, to token ids, within the limits that hold before an
engine sees them.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

from headrace.checkpoint.templates import Renderer
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.errors import RequestError
from headrace.request import check_names

Prompt = str | Mapping[str, Any]
"""Text, or `{"prompt": text}`, or `{"prompt_token_ids": [...]}`, which may name its text beside it.
"""
Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`"""


class TokenizedPrompt(NamedTuple):
    """A prompt as token ids, which `Engine.check` has yet to look at: those that a caller gave are
    as they were given.
    """

    token_ids: Sequence[int]
    text: str | None
    """The text that was tokenised, or that the caller gave beside the token ids."""


class PromptReader:
    """Reads the prompts of one model, whose longest sequence has `max_model_len` tokens. May be
    used from several threads.

    Text is tokenised as what the model expects at its beginning (usually a first BOS) and itself,
    and control tokens spelt out in it are plain text; a rendered chat template brings all of these
    itself.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        chat_template: str | None,
        renderer: Renderer,
        max_model_len: int,
        tool_template: str | None = None,
    ) -> None:
        """`tool_template`: for conversations with tools, where there is another for them."""
        self._model = model
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._tool_template = tool_template
        self._renderer = renderer
        self.max_model_len = max_model_len

    def close(self) -> None:
        """End the process that renders conversations; text can still be read. May be called more
        than once.
        """
        self._renderer.close()

    def read(self, prompt: Prompt | Sequence[Message]) -> TokenizedPrompt:
        """Read a prompt or a conversation. Raises as the other two do."""
        return (
            self.read_prompt(prompt)
            if isinstance(prompt, str | Mapping)
            else self.read_chat(prompt)
        )

    def read_prompt(self, prompt: Prompt, *, add_special: bool = True) -> TokenizedPrompt:
        """Read text or a dictionary. `add_special` adds what the model expects around a text, as a
        first BOS.

        Raises RequestError for anything else, empty text, and text too long for the context.
        """
        if isinstance(prompt, str):
            return self._tokenize(prompt, add_special=add_special)
        if not isinstance(prompt, Mapping):
            raise RequestError(
                f"a prompt must be text or a dictionary, not {type(prompt).__name__}"
            )
        check_names("key of a prompt", prompt, ("prompt", "prompt_token_ids"))
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"a prompt must be text, not {type(text).__name__}")
        if "prompt_token_ids" in prompt:
            return TokenizedPrompt(prompt["prompt_token_ids"], text)
        return self._tokenize(text or "", add_special=add_special)

    def read_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenizedPrompt:
        """Read a conversation, rendered by the model's chat template: see `Renderer.render` for the
        options.

        With `continue_final_message` the text ends where the content of the last message does, so
        that the answer goes on with it. Raises RequestError for a model without a chat template,
        for what is no conversation, or one that the template cannot render, and for one too long
        for the context; FormatError for a template that does what it must not.
        """
        template = (
            self._chat_template
            if tools is None or self._tool_template is None
            else self._tool_template
        )
        if template is None:
            raise RequestError(
                f"{self._model} has no chat template, so it cannot take a conversation: "
                "give it plain text, with LLM.generate or headrace run --raw"
            )
        if not is_conversation(messages):
            raise RequestError(
                "a conversation must be a list of messages, each with a role and content"
            )
        tokenizer = self._tokenizer
        text = self._renderer.render(
            template,
            messages,
            bos=tokenizer.bos_token,
            eos=tokenizer.eos_token,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._tokenize(
            _up_to_content(text, messages[-1]) if continue_final_message else text, rendered=True
        )

    def _tokenize(
        self, text: str, *, rendered: bool = False, add_special: bool = True
    ) -> TokenizedPrompt:
        longest = self.max_model_len
        size = len(text.encode(errors="surrogatepass"))
        if not size:
            raise RequestError("the prompt is empty")
        # Tokenising takes time that grows with the text: what cannot fit is refused before.
        if size > longest and size > longest * self._longest_token:
            raise RequestError(
                f"the prompt has {size:,} bytes, more than a context of {longest:,} tokens can hold"
            )
        return TokenizedPrompt(
            self._tokenizer.encode(
                text, add_special=add_special and not rendered, parse_special=rendered
            ),
            text,
        )

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token."""
        return max(
            len(self._tokenizer.token_bytes(token)) for token in range(self._tokenizer.vocab_size)
        )


def _up_to_content(text: str, message: Message) -> str:
    """A rendered conversation without what the template writes behind its last message. Raises
    RequestError where that cannot be told.
    """
    content = message.get("content")
    words = content.strip() if isinstance(content, str) else ""
    place = text.rfind(words) if words else -1
    if place < 0:
        raise RequestError(
            "continue_final_message needs a last message with text, which the chat "
            "template writes as it is"
        )
    return text[: place + len(words)]


def is_conversation(messages: object) -> TypeGuard[Sequence[Message]]:
    """Whether this is a list of dictionaries, and not an empty one."""
    return (
        isinstance(messages, Sequence)
        and bool(messages)
        and all(isinstance(message, Mapping) for message in messages)
    )
