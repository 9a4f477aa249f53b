"""Rules that split text before byte-level BPE, by the name in `tokenizer.ggml.pre`.

Names are llama.cpp's (`llama-vocab.cpp`). Others are refused: a wrong split changes token ids
without an error.
"""

# ruff: noqa: RUF001 - the expressions contain letters that look like others

from tokenizers import Regex, pre_tokenizers

from headrace.errors import UnsupportedModelError
from headrace.record import frozen

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CONTRACTIONS = _CONTRACTION + "|"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇ"
    "Ꞌ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Cased letters and others that DeepSeek LLM keeps together."""
_PUNCTUATION = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
)
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@frozen
class PreTokenizer:
    expressions: tuple[str, ...]
    whole_words: bool = False
    """`ignore_merges`."""
    adds_bos: bool = False
    composes: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        splits = [
            pre_tokenizers.Split(Regex(expression), "isolated") for expression in self.expressions
        ]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_RULES: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2 phi-2 mpt olmo jais trillion exaone4 granite-docling": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b": PreTokenizer(
        (r"\p{N}", _GPT2)
    ),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        (_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST,), whole_words=True, adds_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST,)),
    "qwen2": PreTokenizer((_CONTRACTIONS + _WORDS + r"\p{N}" + _REST,), composes=True),
    "deepseek-r1-qwen megrez stablelm2 hunyuan": PreTokenizer(
        (_CONTRACTIONS + _WORDS + r"\p{N}" + _REST,)
    ),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
    "glm4": PreTokenizer((_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST,), whole_words=True),
    "gpt-4o llama4 kanana2": PreTokenizer((_O200K,)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "bloom poro-chat gpt3-finnish": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "viking": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        )
    ),
    "deepseek-v3 hunyuan-dense": PreTokenizer(
        (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _PUNCTUATION + _SPACES)
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: rule for names, rule in _RULES.items() for name in names.split()
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Raises UnsupportedModelError."""
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre: unknown pre-tokenizer {name[:80]!r}; supported: "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]
