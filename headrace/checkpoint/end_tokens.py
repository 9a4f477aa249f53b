"""Control tokens that end a response, by name.

A name only suggests an end. A list of ids in a model's files replaces the names, and a token that
its type calls text is no end.
"""

from collections.abc import Set as AbstractSet

LLAMA_CPP = "llama.cpp, src/llama-vocab.cpp, the names of special_eog_ids"
LLAMA_CPP_FIM = "llama.cpp, src/llama-vocab.cpp, the names of special_fim_*_id"

END_TOKENS: dict[str, str] = {
    "<|endoftext|>": f"GPT-2, Qwen, Phi, GLM; {LLAMA_CPP}",
    "<|im_end|>": f"ChatML: Qwen, Yi, SmolLM2; {LLAMA_CPP}",
    "</s>": f"Llama 2, Mistral; {LLAMA_CPP}",
    "<|end|>": f"Phi-3, Phi-4-mini; {LLAMA_CPP}",
    "<|eot_id|>": f"Llama 3; {LLAMA_CPP}",
    "<|eom_id|>": f"Llama 3.1, after a call of a built-in tool; {LLAMA_CPP}",
    "<|end_of_text|>": f"Llama 3, Granite; {LLAMA_CPP}",
    "<end_of_turn>": f"Gemma 1 to 3; {LLAMA_CPP}",
    "<eos>": f"Gemma; {LLAMA_CPP}",
    "<turn|>": f"Gemma 4; {LLAMA_CPP}",
    "<|tool_response>": f"Gemma 4, which waits for the result of a tool; {LLAMA_CPP}",
    "<|return|>": f"gpt-oss; {LLAMA_CPP}; generation_config.json of openai/gpt-oss-20b",
    "<|call|>": f"gpt-oss, after a tool call; {LLAMA_CPP}; generation_config.json of "
    "openai/gpt-oss-20b",
    "<|flush|>": f"Solar Open; {LLAMA_CPP}",
    "<|calls|>": f"Solar Open, after tool calls; {LLAMA_CPP}",
    "<EOT>": f"Code Llama; {LLAMA_CPP}",
    "_<EOT>": f"Code Llama; {LLAMA_CPP}",
    "\u2581<EOT>": "tokenizer.json of codellama/CodeLlama-7b-hf",
    "[EOT]": f"Kimi K2; {LLAMA_CPP}",
    "[EOS]": f"Kimi K2; {LLAMA_CPP}",
    "[e~[": f"MiniMax M2; {LLAMA_CPP}",
    "<end_of_utterance>": f"SmolDocling; {LLAMA_CPP}",
    "<｜end▁of▁sentence｜>": f"DeepSeek; {LLAMA_CPP}",
    "<|END_OF_TURN_TOKEN|>": "generation_config.json of CohereForAI/c4ai-command-r-v01",
}
"""Each name with the models that use it and the source of the entry."""

FILL_IN_TOKENS: dict[str, str] = {
    "<|fim_middle|>": f"Qwen2.5-Coder, CodeGemma; {LLAMA_CPP_FIM}",
    "<fim-middle>": LLAMA_CPP_FIM,
    "<fim_middle>": f"StarCoder, Granite; {LLAMA_CPP_FIM}",
    "<\uff5cfim\u2581end\uff5c>": f"DeepSeek-Coder; {LLAMA_CPP_FIM}",
    "<MID>": f"Code Llama; {LLAMA_CPP_FIM}",
    "\u2581<MID>": f"Code Llama; {LLAMA_CPP_FIM}",
    "<|code_middle|>": f"GLM-4.5; {LLAMA_CPP_FIM}",
    "[MIDDLE]": "Codestral: mistral-common, SpecialTokens.middle",
}
"""Tokens after which a model fills in the middle of a file, with the source of each entry."""

FILE_END_TOKENS: dict[str, str] = {
    "<|fim_pad|>": f"Qwen2.5-Coder; {LLAMA_CPP_FIM}",
    "<fim-pad>": LLAMA_CPP_FIM,
    "<fim_pad>": f"StarCoder, Granite; {LLAMA_CPP_FIM}",
    "<PAD>": LLAMA_CPP_FIM,
    "<|fim_repo|>": LLAMA_CPP_FIM,
    "<|repo_name|>": f"Qwen2.5-Coder; {LLAMA_CPP_FIM}",
    "<fim-repo>": LLAMA_CPP_FIM,
    "<REPO>": LLAMA_CPP_FIM,
    "<reponame>": f"Granite; {LLAMA_CPP_FIM}",
    "<|file_sep|>": f"Qwen2.5-Coder; {LLAMA_CPP_FIM}",
    "<repo_name>": "StarCoder 2: Lozhkov et al. 2024, the format of repositories",
    "<file_sep>": "StarCoder 2: Lozhkov et al. 2024, the format of repositories",
    "<|file_separator|>": "CodeGemma: its model card, on fill-in-the-middle",
}
"""Tokens before the next file or repository, which end the middle of a file, with sources.

They end a response if the vocabulary has one of `FILL_IN_TOKENS`, as added tokens of any type:
Qwen2.5-Coder calls them text.
"""

_NO_ENDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("<|end|>", frozenset({"<|return|>", "<|call|>"})),  # gpt-oss: ends a message of a response
    ("<|end|>", frozenset({"<|flush|>", "<|calls|>"})),  # Solar Open: the same
    ("</s>", frozenset({"<|tool_response>"})),  # Gemma 4: an HTML tag
)
"""A name that is no end if the vocabulary has all the other names; the rules are llama.cpp's."""


def excluded_names(added_tokens: AbstractSet[str]) -> frozenset[str]:
    """Return the names that are no ends in a vocabulary with these added tokens, of any type."""
    return frozenset(name for name, others in _NO_ENDS if others <= added_tokens)


def end_names(control_tokens: AbstractSet[str], added_tokens: AbstractSet[str]) -> frozenset[str]:
    """Return the tokens whose names say that they end a response: control tokens, and ends of
    files in a vocabulary for filling in.
    """
    ends = control_tokens & END_TOKENS.keys()
    if added_tokens & FILL_IN_TOKENS.keys():
        ends |= added_tokens & FILE_END_TOKENS.keys()
    return frozenset(ends) - excluded_names(added_tokens)
