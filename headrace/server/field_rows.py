"""Fields of other servers' APIs that no record of this server has, or that a record reads as a
plain object: served, ignored because they change no answer, or refused with a reason.

`field_table` refuses by these rows, and docs/reference/fields.md is made from them. Facts are of
the Python packages openai 3.57 and anthropic 2.14, vLLM 0.33, SGLang 0.5.23, and llama.cpp's
server and Ollama of November 2026.
"""

from typing import Any

CHAT = "chat completions"
TEXT = "completions"
RESPONSES = "responses"
MESSAGES = "messages"
COUNT = "count_tokens"
EMBEDDINGS = "embeddings"
TOKENIZE = "tokenize"
DETOKENIZE = "detokenize"

_OPENAI = (CHAT, TEXT)
GENERATING = (CHAT, TEXT, RESPONSES, MESSAGES)
_ANTHROPIC = (MESSAGES, COUNT)
_TEXT_ONLY = "this server reads and writes text only"
_MEDIA = "it only changes how images, audio and video are read"
_NEVER_CUT = "a conversation is never cut; one that is too long is an error"
_NO_STORE = "responses are not stored; send the whole conversation"
_ONE_SERVER = "prefill and decoding run in one server"
_SAMPLER = "no sampler here has it"
_OLLAMA = "it is a field of Ollama's own API"

Group = tuple[tuple[str, ...], dict[str, str]]
"""APIs, and the reasons of their fields by path; `[]` follows a list."""

SERVED: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (
        _OPENAI,
        (
            "response_format.type",
            "response_format.json_schema",
            "response_format.json_schema.schema",
            "response_format.json_schema.strict",
            "response_format.schema",
            "response_format.structures",
            "response_format.triggers",
            "response_format.format",
        ),
    ),
    (
        (CHAT, TOKENIZE),
        (
            "tools[].type",
            "tools[].function",
            "tools[].function.name",
            "tools[].function.description",
            "tools[].function.parameters",
            "tools[].function.strict",
        ),
    ),
    (
        (CHAT,),
        (
            "tool_choice.type",
            "tool_choice.function",
            "tool_choice.function.name",
            "tool_choice.allowed_tools",
            "tool_choice.allowed_tools.mode",
            "tool_choice.allowed_tools.tools",
        ),
    ),
    (
        (RESPONSES,),
        (
            "text.format",
            "text.format.type",
            "text.format.schema",
            "text.format.strict",
            "text.verbosity",
            "tools[].type",
            "tools[].name",
            "tools[].description",
            "tools[].parameters",
            "tools[].strict",
            "tool_choice.type",
            "tool_choice.name",
            "tool_choice.mode",
            "tool_choice.tools",
        ),
    ),
]
"""Fields inside of objects that a record does not describe."""

IGNORED: list[Group] = [
    (
        (*_OPENAI, RESPONSES, EMBEDDINGS),
        {"user": "the server keeps no account of end users"},
    ),
    (
        (CHAT, RESPONSES),
        {
            "prompt_cache_key": "the prefix cache finds a shared beginning by itself",
            "prompt_cache_options": "the prefix cache has no options of a request",
            "prompt_cache_retention": "the prefix cache keeps what its memory holds",
            "safety_identifier": "the server keeps no account of end users",
            "service_tier": "there is one tier; see `priority`",
            "store": "responses are never stored",
        },
    ),
    (
        (*_OPENAI, RESPONSES),
        {"stream_options.include_obfuscation": "chunks have no padding, whatever the value"},
    ),
    (
        (CHAT,),
        {
            "metadata": "it labels stored responses, and responses are never stored",
            "prediction": "it only saves time; the proposers predict without it",
            "response_format.json_schema.name": "a name for logs",
            "response_format.json_schema.description": "the schema alone restricts the text",
            "stream_reasoning": "reasoning is streamed as it comes",
            "media_io_kwargs": _MEDIA,
            "max_dynamic_patch": _MEDIA,
            "min_dynamic_patch": _MEDIA,
            "use_audio_in_video": _MEDIA,
            "video_config": _MEDIA,
        },
    ),
    (
        _OPENAI,
        {
            "spaces_between_special_tokens": "text has the bytes of its tokens and no more",
            "session_id": "it only chooses a replica",
            "mm_processor_kwargs": _MEDIA,
            "images_config": _MEDIA,
            "rid": "it names the request; `x-request-id` does so here",
            "data_parallel_rank": "it only chooses a replica",
            "routed_dp_rank": "it only chooses a replica",
            "custom_labels": "labels for metrics of SGLang",
            "return_cached_tokens_details": "`usage` always has the cached tokens",
            "cache_prompt": "the prefix cache is on, and changes no token",
            "n_cache_reuse": "the prefix cache has no options of a request",
            "id_slot": "it only chooses a place in the batch",
            "n_keep": "a context that is full ends the answer",
            "n_discard": "a context that is full ends the answer",
            "backend_sampling": "it only chooses where samples are drawn",
            "sse_ping_interval": "the server's `--keepalive-seconds` sets it",
            "speculative.n_max": "it changes speed, not tokens",
            "speculative.n_min": "it changes speed, not tokens",
            "speculative.p_min": "it changes speed, not tokens",
            "dynatemp_exponent": "it needs `dynatemp_range`",
            "repeat_last_n": "it needs `repeat_penalty`",
            "dry_base": "it needs `dry_multiplier`",
            "dry_allowed_length": "it needs `dry_multiplier`",
            "dry_penalty_last_n": "it needs `dry_multiplier`",
            "dry_sequence_breakers": "it needs `dry_multiplier`",
            "xtc_threshold": "it needs `xtc_probability`",
            "mirostat_tau": "it needs `mirostat`",
            "mirostat_eta": "it needs `mirostat`",
            "adaptive_decay": "it needs `adaptive_target`",
            "timings_per_token": "`timing` comes once, with the whole answer",
            "verbose": "the log has the details of a request",
        },
    ),
    (
        (TEXT,),
        {
            "response_format.json_schema.name": "a name for logs",
            "response_format.json_schema.description": "the schema alone restricts the text",
        },
    ),
    (
        (RESPONSES,),
        {
            "text.format.name": "a name for logs",
            "text.format.description": "the schema alone restricts the text",
            "reasoning.summary": "reasoning comes whole, without a summary",
            "reasoning.generate_summary": "reasoning comes whole, without a summary",
            "reasoning.context": "the conversation says what reasoning the model sees",
            "truncation": _NEVER_CUT,
            "context_management": _NEVER_CUT,
            "background_options": "it needs `background`",
            "access_programs": "there is no access program to join",
            "image": _MEDIA,
            "media_io_kwargs": _MEDIA,
            "mm_processor_kwargs": _MEDIA,
            "spaces_between_special_tokens": "text has the bytes of its tokens and no more",
            "tools[].defer_loading": "all tools are shown to the model at once",
            "request_id": "the server gives ids to responses",
            "data_parallel_rank": "it only chooses a replica",
            "routed_dp_rank": "it only chooses a replica",
            "session_id": "it only chooses a replica",
        },
    ),
    (
        _ANTHROPIC,
        {
            "cache_control": "the prefix cache finds a shared beginning by itself",
            "speed": "there is one speed",
            "user_profile_id": "the server keeps no account of end users",
            "workspace_id": "the server keeps no account of end users",
            "billing_policy": "the server sends no bills",
            "betas": "no field depends on it",
            "context_management": _NEVER_CUT,
            "tools[].cache_control": "the prefix cache finds a shared beginning by itself",
            "tools[].defer_loading": "all tools are shown to the model at once",
            "tools[].eager_input_streaming": "arguments are streamed as they come",
            "thinking.display": "the reasoning comes whole",
            "thinking.block_binding": "reasoning of earlier turns is taken as it comes",
        },
    ),
    (
        GENERATING,
        {"keep_alive": "the model stays in memory"},
    ),
    (
        (RESPONSES, MESSAGES),
        {"stream_interval": "events come as tokens do"},
    ),
    (
        (MESSAGES,),
        {
            "stream_options": "a stream always has its usage",
            "request_id": "`x-request-id` names a request",
            "priority": "all requests of this API have one priority",
            "metadata": "the server keeps no account of end users",
            "service_tier": "there is one tier",
            "inference_geo": "the server runs where it runs",
            "diagnostics": "the prefix cache keeps no account of single messages",
            "fallback_credit_token": "the server sends no bills",
            "mm_payload": _MEDIA,
        },
    ),
    (
        (EMBEDDINGS,),
        {
            "request_id": "`x-request-id` names a request",
            "rid": "`x-request-id` names a request",
            "cache_salt": "embeddings are computed anew, without the prefix cache",
            "mm_processor_kwargs": _MEDIA,
        },
    ),
    (
        (TOKENIZE,),
        {"media_io_kwargs": _MEDIA, "mm_processor_kwargs": _MEDIA},
    ),
]
"""Fields that a client may send and that change no answer."""

REFUSED: list[Group] = [
    (
        (CHAT,),
        {
            "audio": _TEXT_ONLY,
            "modalities": _TEXT_ONLY,
            "tool_choice.custom": "custom tools belong to /v1/responses",
            "web_search_options": "this server does not search the web",
            "task": "it belongs to one model of SGLang's",
            "separate_reasoning": "see `include_reasoning`",
            "add_special_tokens": "the chat template writes the first tokens",
            "input_ids": "send token ids to /v1/completions",
            "return_prompt_text": "/tokenize and /detokenize give the rendered prompt",
            "parse_tool_calls": "`tool_choice: none` leaves calls in the text",
            "reasoning_format": "the server's `--reasoning-parser` sets it",
            "chat_format": "the server's `--tool-call-parser` sets it",
        },
    ),
    (
        (CHAT, RESPONSES),
        {"moderation": "this server has no moderation model"},
    ),
    (
        _OPENAI,
        {
            "watermarking": _SAMPLER,
            "watermark": _SAMPLER,
            "repetition_detection": "use `frequency_penalty`, or a stop text",
            "kv_transfer_params": "the caches of two servers cannot be joined here",
            "ec_transfer_params": _TEXT_ONLY,
            "mm_payload": _TEXT_ONLY,
            "return_mm_kwargs": _TEXT_ONLY,
            "vllm_xargs": "no plugin reads it",
            "custom_params": "no plugin reads it",
            "custom_logit_processor": "the server runs no code of a request",
            "return_weight_versions": "weights do not change while a server runs",
            "return_token_offsets": "`logprobs` has the offsets of completions",
            "routed_experts_prompt_start": "experts of a token are not reported",
            "return_routed_experts": "experts of a token are not reported",
            "routed_experts_start_len": "experts of a token are not reported",
            "return_hidden_states": "hidden states are not reported; see /v1/embeddings",
            "return_spec_tokens_details": "/metrics has the accepted drafts",
            "return_prompt_token_ids": "use `return_token_ids`",
            "return_meta_info": "use `return_token_ids` and `logprobs`",
            "return_input_ids_in_sglext": "use `return_token_ids`",
            "return_output_ids_in_sglext": "use `return_token_ids`",
            "return_sampling_mask": "masks of the sampler are not reported",
            "sampling_logprobs_mode": "log-probabilities are of the model, before sampling",
            "return_flat_raw_output_top_logprobs": "use `logprobs`",
            "return_flat_raw_top_logprobs_b64": "use `logprobs`",
            "stop_regex": "use `stop`, or `structured_outputs.regex`",
            "no_stop_trim": "use `include_stop_str_in_output`",
            "lora_path": "name the adapter in `model`",
            "lora": "name the adapter in `model`",
            "session_params": "each request brings its whole prompt",
            "extra_key": "use `cache_salt`",
            "bootstrap_host": _ONE_SERVER,
            "bootstrap_port": _ONE_SERVER,
            "bootstrap_room": _ONE_SERVER,
            "disagg_prefill_dp_rank": _ONE_SERVER,
            "n_predict": "use `max_tokens`",
            "n_cmpl": "use `n`",
            "n_indent": _SAMPLER,
            "min_keep": _SAMPLER,
            "n_probs": "use `logprobs`",
            "post_sampling_probs": "log-probabilities are of the model, before sampling",
            "t_max_predict_ms": "use `max_tokens`",
            "response_fields": "a response has all its fields",
            "return_tokens": "use `return_token_ids`",
            "return_progress": "no event reports the progress of a prompt",
            "samplers": "the samplers have one order: see docs/reference/python.md",
            "dynatemp_range": _SAMPLER,
            "typical_p": _SAMPLER,
            "top_n_sigma": _SAMPLER,
            "repeat_penalty": "use `repetition_penalty`, which counts all tokens",
            "dry_multiplier": _SAMPLER,
            "xtc_probability": _SAMPLER,
            "mirostat": _SAMPLER,
            "adaptive_target": _SAMPLER,
            "grammar_lazy": "a grammar holds from the first token of the answer",
            "reasoning_budget_tokens": "use `thinking_token_budget`",
            "thinking_budget_tokens": "use `thinking_token_budget`",
        },
    ),
    (
        GENERATING,
        {
            "think": _OLLAMA,
            "format": _OLLAMA,
            "options": _OLLAMA,
            "num_ctx": _OLLAMA,
            "num_predict": _OLLAMA,
        },
    ),
    (
        (TEXT,),
        {
            "suffix": "put the markers of the model around the text yourself",
            "prompt_embeds": "the server takes text and token ids",
        },
    ),
    (
        (RESPONSES,),
        {
            "background": _NO_STORE,
            "previous_response_id": _NO_STORE,
            "conversation": _NO_STORE,
            "prompt": "no prompts are stored; send `instructions` and `input`",
            "tool_choice.server_label": "the server calls no tools itself",
            "max_tool_calls": "the server calls no tools itself",
            "reasoning.mode": "reasoning has one mode; use `reasoning.effort`",
            "previous_input_messages": _NO_STORE,
            "enable_response_messages": "the response has items, not messages",
            "watermarking": _SAMPLER,
            "mm_payload": _TEXT_ONLY,
            "return_mm_kwargs": _TEXT_ONLY,
            "vllm_xargs": "no plugin reads it",
            "kv_transfer_params": "the caches of two servers cannot be joined here",
            "ec_transfer_params": _TEXT_ONLY,
            "extra_key": "use `cache_salt`",
            "bootstrap_host": _ONE_SERVER,
            "bootstrap_port": _ONE_SERVER,
            "bootstrap_room": _ONE_SERVER,
            "disagg_prefill_dp_rank": _ONE_SERVER,
            "tools[].allowed_callers": "the model alone calls tools",
            "tools[].output_schema": "results of tools are taken as they come",
            "tools[].async": "a call waits for its result",
        },
    ),
    (
        _ANTHROPIC,
        {
            "mcp_servers": "the server calls no tools itself",
            "compaction": "the conversation is used as it comes",
            "tools[].allowed_callers": "the model alone calls tools",
            "output_config.task_budget": "use `max_tokens`",
        },
    ),
    (
        (MESSAGES,),
        {
            "container": "the server runs no code",
            "fallbacks": "the server has one model",
            "thread": _NO_STORE,
            "watermarking": _SAMPLER,
            "return_mm_kwargs": _TEXT_ONLY,
            "vllm_xargs": "no plugin reads it",
            "kv_transfer_params": "the caches of two servers cannot be joined here",
            "ec_transfer_params": _TEXT_ONLY,
        },
    ),
    (
        (EMBEDDINGS,),
        {
            "dimensions": "this model's vectors have one size",
            "messages": "send the rendered text as `input`",
            "padding": "a prompt is never padded",
            "embed_dtype": "vectors are float32",
            "endianness": "base64 is little endian",
            "use_activation": "use `normalize`",
            "lora_path": "name the adapter in `model`",
            "embed_override_token_id": "the server takes text and token ids",
            "embed_overrides": "the server takes text and token ids",
        },
    ),
]
"""Fields that would change the answer."""

_TEMPLATE = "no chat template renders the prompt"
_CONSTRAINED = ("ebnf", "grammar", "json_schema", "regex")
_GUIDED = ("guided_choice", "guided_grammar", "guided_json", "guided_regex")

COUNTERPARTS: dict[str, dict[str, str]] = {
    CHAT: {
        "best_of": "use `n`",
        "include": "use `logprobs`",
        "instructions": "send a message of role `system`",
        "max_output_tokens": "use `max_completion_tokens`",
        "output_config": "use `response_format` and `reasoning_effort`",
        "output_format": "use `response_format`",
        "parse_special": "see `--no-sanitize-control-tokens`",
        "reasoning": "use `reasoning_effort`",
        "stop_sequences": "use `stop`",
        "system": "send a message of role `system`",
        "text": "use `response_format` and `verbosity`",
    },
    TEXT: {
        "chat_template": _TEMPLATE,
        "chat_template_kwargs": _TEMPLATE,
        "enable_thinking": _TEMPLATE,
        "max_completion_tokens": "use `max_tokens`",
        "max_output_tokens": "use `max_tokens`",
        "output_config": "use `response_format`",
        "output_format": "use `response_format`",
        "reasoning": _TEMPLATE,
        "reasoning_effort": _TEMPLATE,
        "stop_sequences": "use `stop`",
        "text": "use `response_format`",
        "thinking": _TEMPLATE,
        "top_logprobs": "use `logprobs`",
    },
    RESPONSES: {
        **dict.fromkeys((*_CONSTRAINED, *_GUIDED), "use `structured_outputs`"),
        "enable_thinking": "use `reasoning.effort`",
        "logprobs": "use `top_logprobs`",
        "max_completion_tokens": "use `max_output_tokens`",
        "max_tokens": "use `max_output_tokens`",
        "output_config": "use `text.format` and `reasoning.effort`",
        "output_format": "use `text.format`",
        "reasoning_effort": "use `reasoning.effort`",
        "response_format": "use `text.format`",
        "stop_sequences": "use `stop`",
        "system": "use `instructions`",
        "thinking": "use `reasoning.effort`",
        "verbosity": "use `text.verbosity`",
    },
    MESSAGES: {
        **dict.fromkeys((*_CONSTRAINED, *_GUIDED), "use `output_config.format`"),
        "enable_thinking": "use `thinking`",
        "instructions": "use `system`",
        "max_completion_tokens": "use `max_tokens`",
        "max_output_tokens": "use `max_tokens`",
        "parallel_tool_calls": "use `tool_choice.disable_parallel_tool_use`",
        "reasoning": "use `thinking`",
        "reasoning_effort": "use `output_config.effort`",
        "response_format": "use `output_config.format`",
        "stop": "use `stop_sequences`",
        "structured_outputs": "use `output_config.format`",
        "text": "use `output_config.format`",
        "thinking_token_budget": "use `thinking.budget_tokens`",
    },
}
"""What an API has in the place of a field that only other APIs have. It refuses such fields."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "continue_final_message": (True,),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("auto", "none"),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "n_cmpl": (1,),
    "t_max_predict_ms": (-1,),
    "typical_p": (1,),
    "top_n_sigma": (-1,),
    "repeat_penalty": (1,),
    "adaptive_target": (-1,),
    "separate_reasoning": (True,),
    "parse_tool_calls": (True,),
    "reasoning_format": ("auto", "deepseek"),
    "reasoning_budget_tokens": (-1,),
    "thinking_budget_tokens": (-1,),
    "reasoning.mode": ("standard",),
    "tools[].allowed_callers": (["direct"],),
    "padding": ("do_not_pad",),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "use_activation": (True,),
}
"""Values of refused fields that ask for what the server does anyway, next to null, false, 0 and
empty texts and lists.
"""

MEANT = (
    "adaptive_target",
    "enable_thinking",
    "include_reasoning",
    "max_tool_calls",
    "n_predict",
    "parallel_tool_calls",
    "parse_tool_calls",
    "separate_reasoning",
    "skip_special_tokens",
    "think",
    "top_n_sigma",
    "use_activation",
)
"""Refused fields whose false or 0 asks for something."""
