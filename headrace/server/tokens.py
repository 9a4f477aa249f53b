"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, as vLLM has them."""

from functools import partial

from headrace.server.asgi import Call
from headrace.server.errors import invalid
from headrace.server.openai_messages import messages_of
from headrace.server.openai_records import DetokenizeRequest, TokenizeRequest
from headrace.server.output_parsers.tools import read_tools
from headrace.server.served_model import ServedModel


async def tokenize(served: ServedModel, call: Call) -> None:
    """The tokens of a text, or of a conversation as the chat template renders it."""
    asked = await call.read(TokenizeRequest)
    served.adapter_of(asked.model)
    read_tools(asked.tools)
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("give prompt or messages", "prompt")
    with served.admitted(call, 1):
        if asked.prompt is not None:
            read = partial(
                served.prompts.read_prompt,
                asked.prompt,
                add_special=asked.add_special_tokens is not False,
            )
        else:
            read = partial(
                served.prompts.read_chat,
                messages_of(asked.messages or []),
                tools=asked.tools,
                add_generation_prompt=asked.add_generation_prompt is not False,
                chat_template_kwargs=asked.chat_template_kwargs,
            )
        ids = (
            await served.tokens_of(read, "messages" if asked.messages else "prompt", 0)
            if asked.prompt != ""
            else []
        )
    texts = (
        [served.tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
        if asked.return_token_strs
        else None
    )
    await call.respond(
        {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": served.prompts.max_model_len,
            "token_strs": texts,
        }
    )


async def detokenize(served: ServedModel, call: Call) -> None:
    """The text of tokens, control tokens included."""
    asked = await call.read(DetokenizeRequest)
    served.adapter_of(asked.model)
    if len(asked.tokens) > served.prompts.max_model_len:
        raise invalid(
            f"tokens has {len(asked.tokens):,} entries, more than a context of "
            f"{served.prompts.max_model_len:,}",
            "tokens",
        )
    if max(asked.tokens, default=0) >= served.tokenizer.vocab_size:
        raise invalid(
            f"tokens has {max(asked.tokens):,}, and the vocabulary ends at "
            f"{served.tokenizer.vocab_size - 1:,}",
            "tokens",
        )
    await call.respond({"prompt": served.tokenizer.decode(asked.tokens, skip_special=False)})


async def tokenizer_info(served: ServedModel, call: Call) -> None:
    """What clients that tokenise by themselves ask for."""
    tokenizer = served.tokenizer
    await call.respond(
        {
            "vocab_size": tokenizer.vocab_size,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "max_model_len": served.prompts.max_model_len,
        }
    )
