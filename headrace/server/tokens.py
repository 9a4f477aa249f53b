"""Routes of the tokenizer, compatible with vLLM and llama.cpp."""

from functools import partial
from typing import Any

import msgspec

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.server.errors import invalid
from headrace.server.http_exchange import HttpExchange
from headrace.server.openai_records import DetokenizeRequest, TokenizeRequest
from headrace.server.output_parsers.tools import read_tools
from headrace.server.state import ServerState


async def tokenize(http: HttpExchange, state: ServerState) -> None:
    """Token ids of a text, or of a conversation rendered by the chat template."""
    request = await http.read(TokenizeRequest)
    state.resolve_adapter(request.model)
    read_tools(request.tools)
    given = (request.prompt, request.content, request.messages)
    if sum(value is not None for value in given) != 1:
        raise invalid("prompt, content or messages must be given, and only one of them", "prompt")

    with state.admit(http, 1):
        ids = await _token_ids(state, request)
    texts = None
    if request.return_token_strs:
        texts = [state.tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
    tokens: list[Any] = ids
    if request.with_pieces:
        tokens = [{"id": token, "piece": _piece(state.tokenizer, token)} for token in ids]
    await http.respond(
        {
            "tokens": tokens,
            "count": len(ids),
            "max_model_len": state.prompt_reader.max_model_len,
            "token_strs": texts,
        }
    )


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    """The text of a token; its bytes, if they are a part of a character. llama.cpp does so."""
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def _token_ids(state: ServerState, request: TokenizeRequest) -> list[int]:
    text = request.content if request.prompt is None else request.prompt
    if text == "":
        return []
    if text is not None:
        # vLLM adds special tokens by default, llama.cpp does not.
        add_special_tokens = request.add_special_tokens
        if add_special_tokens is None:
            add_special_tokens = request.add_special
        if add_special_tokens is None:
            add_special_tokens = request.content is None
        read = partial(
            state.prompt_reader.read_prompt,
            text,
            add_special_tokens=add_special_tokens,
            parse_special=request.parse_special is not False,
        )
        return await state.tokenize(read, "prompt", max_tokens=0)
    read = partial(
        state.prompt_reader.read_chat,
        [msgspec.to_builtins(message) for message in request.messages or ()],
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt is not False,
        documents=request.documents,
        continue_final_message=bool(request.continue_final_message),
        chat_template_kwargs=request.chat_template_kwargs,
        chat_template=state.named_template(request.chat_template),
        sanitize_control_tokens=state.settings.sanitize_control_tokens,
    )
    return await state.tokenize(read, "messages" if request.messages else "prompt", max_tokens=0)


async def detokenize(http: HttpExchange, state: ServerState) -> None:
    """Text of token ids, control tokens included."""
    request = await http.read(DetokenizeRequest)
    state.resolve_adapter(request.model)
    max_model_len, vocab_size = state.prompt_reader.max_model_len, state.tokenizer.vocab_size
    if len(request.tokens) > max_model_len:
        raise invalid(
            f"tokens has {len(request.tokens):,} entries, more than the context of "
            f"{max_model_len:,} tokens",
            "tokens",
        )
    if max(request.tokens, default=0) >= vocab_size:
        raise invalid(
            f"tokens contains {max(request.tokens):,}, but the vocabulary ends at "
            f"{vocab_size - 1:,}",
            "tokens",
        )
    text = state.tokenizer.decode(request.tokens, skip_special=bool(request.skip_special_tokens))
    await http.respond({"prompt": text, "content": text})


async def tokenizer_info(http: HttpExchange, state: ServerState) -> None:
    """Vocabulary size, special tokens and context length, for clients that tokenize themselves."""
    tokenizer = state.tokenizer
    await http.respond(
        {
            "vocab_size": tokenizer.vocab_size,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "max_model_len": state.prompt_reader.max_model_len,
            "chat_template": state.prompt_reader.templates.get("default"),
            "tokenizer_class": type(tokenizer).__name__,
        }
    )
