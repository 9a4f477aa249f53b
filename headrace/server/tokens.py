"""Routes of the tokenizer, compatible with vLLM."""

from functools import partial

from headrace.server.errors import invalid
from headrace.server.http_exchange import HttpExchange
from headrace.server.openai_records import DetokenizeRequest, TokenizeRequest
from headrace.server.output_parsers.tools import read_tools
from headrace.server.state import ServerState
from headrace.server.template_messages import template_messages


async def tokenize(http: HttpExchange, state: ServerState) -> None:
    """Token ids of a text, or of a conversation rendered by the chat template."""
    request = await http.read(TokenizeRequest)
    state.resolve_adapter(request.model)
    read_tools(request.tools)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt or messages must be given, but not both", "prompt")

    with state.admit(http, 1):
        ids = await _token_ids(state, request)
    texts = None
    if request.return_token_strs:
        texts = [state.tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
    await http.respond(
        {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": state.prompt_reader.max_model_len,
            "token_strs": texts,
        }
    )


async def _token_ids(state: ServerState, request: TokenizeRequest) -> list[int]:
    if request.prompt == "":
        return []
    if request.prompt is not None:
        read = partial(
            state.prompt_reader.read_prompt,
            request.prompt,
            add_special=request.add_special_tokens is not False,
        )
        return await state.tokenize(read, "prompt", max_tokens=0)
    read = partial(
        state.prompt_reader.read_chat,
        template_messages(request.messages or []),
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt is not False,
        chat_template_kwargs=request.chat_template_kwargs,
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
    await http.respond({"prompt": state.tokenizer.decode(request.tokens, skip_special=False)})


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
        }
    )
