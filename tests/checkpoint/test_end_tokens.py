"""End tokens: lists of ids, then keys, then names; token types and formats overrule names."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from headrace import LLM, SamplingParams
from headrace.checkpoint.end_tokens import END_TOKENS, FILE_END_TOKENS, FILL_IN_TOKENS
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.checkpoint.tokenizer_gguf import END_LIST
from headrace.checkpoint.tokenizer_hf import tokenizer_from_folder
from headrace.errors import FormatError
from tests.checkpoint.conftest import byte_alphabet

HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
SOLAR = ["<|end|>", "<|flush|>", "<|calls|>"]
GEMMA_4 = ["<eos>", "<turn|>", "<|tool_response>", "</s>"]
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def names_of(tokenizer: Tokenizer) -> set[str]:
    return {tokenizer.token_bytes(token).decode() for token in tokenizer.eos_ids}


def gguf_tokenizer(
    write_gguf: Any, names: list[str], kind: int = CONTROL, **change: Any
) -> Tokenizer:
    """A byte-level tokenizer with tokens of one kind; further keys name their token."""
    tokens = [*names, *byte_alphabet(), "ab"]
    values = {
        "tokens": tokens,
        "token_type": [kind] * len(names) + [NORMAL] * 257,
        "merges": ["a b"],
        "bos_token_id": None,
        "eos_token_id": None,
    }
    values |= {key: tokens.index(value) for key, value in change.items() if key.endswith("_id")}
    given = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    if "template" in change:
        given["tokenizer.chat_template"] = change["template"]
    return open_checkpoint(write_gguf(given)).load_tokenizer()


def folder_tokenizer(
    path: Path,
    names: list[str],
    *,
    special: bool = True,
    config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(byte_alphabet())}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    backend.save(str(path / "tokenizer.json"))
    for name, value in {
        "config.json": config,
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": generation_config,
    }.items():
        (path / name).write_text(json.dumps(value or {}))
    return tokenizer_from_folder(path)


@pytest.mark.parametrize("name", END_TOKENS)
def test_each_control_token_of_the_list_ends(name: str, write_gguf: Any, tmp_path: Path) -> None:
    assert names_of(gguf_tokenizer(write_gguf, [name, "<other>"])) == {name}
    assert names_of(folder_tokenizer(tmp_path, [name, "<other>"])) == {name}


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (HARMONY, {"<|return|>", "<|call|>"}),
        (["<|end|>", "<|return|>"], {"<|end|>", "<|return|>"}),
        (["<|end|>", "<|user|>"], {"<|end|>"}),
        (SOLAR, {"<|flush|>", "<|calls|>"}),
        (GEMMA_4, {"<eos>", "<turn|>", "<|tool_response>"}),
        (["<unk>", "<s>", "</s>"], {"</s>"}),
    ],
)
def test_formats_in_which_a_name_is_no_end(
    names: list[str], ends: set[str], write_gguf: Any, tmp_path: Path
) -> None:
    assert names_of(gguf_tokenizer(write_gguf, names)) == ends
    assert names_of(folder_tokenizer(tmp_path, names)) == ends


@pytest.mark.parametrize("middle", FILL_IN_TOKENS)
def test_files_end_the_middle_of_a_file(middle: str, write_gguf: Any, tmp_path: Path) -> None:
    """Tokens before the next file, whatever their type; only in a vocabulary for filling in."""
    names = [*FILE_END_TOKENS, "<other>"]
    assert names_of(gguf_tokenizer(write_gguf, names)) == set()
    for kind in (CONTROL, USER_DEFINED):
        tokenizer = gguf_tokenizer(write_gguf, [*names, middle], kind)
        assert names_of(tokenizer) == FILE_END_TOKENS.keys()
    for special in (True, False):
        tokenizer = folder_tokenizer(tmp_path, [*names, middle], special=special)
        assert names_of(tokenizer) == FILE_END_TOKENS.keys()
    listed = {"eos_token_id": [256]}
    tokenizer = folder_tokenizer(tmp_path, [*names, middle], generation_config=listed)
    assert names_of(tokenizer) == {names[0]}, "a list of ids replaces the names"


def test_a_text_model_ends_at_its_own_list(tmp_path: Path) -> None:
    """The list of a multimodal model is in text_config, or in both configurations."""
    names = ["<|im_end|>", "<a>", "<b>"]
    cases: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
        ({"text_config": {"eos_token_id": [257, 258]}}, {}, {"<a>", "<b>"}),
        ({"eos_token_id": None, "text_config": {"eos_token_id": [257]}}, {}, {"<a>"}),
        ({"text_config": {"eos_token_id": 257}}, {}, {"<a>", "<|im_end|>"}),
        ({"text_config": {"eos_token_id": 257}}, {"eos_token_id": [258]}, {"<a>", "<b>"}),
        ({"text_config": {}}, {"eos_token_id": [257, 258]}, {"<a>", "<b>"}),
    ]
    for config, generation, ends in cases:
        tokenizer = folder_tokenizer(tmp_path, names, config=config, generation_config=generation)
        assert names_of(tokenizer) == ends


def test_gpt_oss_of_a_gguf_file_ends_at_a_call(write_gguf: Any) -> None:
    """Its only key for an end is `<|return|>`; some files have a key for `<|end|>` too."""
    ends = {"<|return|>", "<|call|>"}
    tokenizer = gguf_tokenizer(write_gguf, HARMONY, eos_token_id="<|return|>")
    assert names_of(tokenizer) == ends
    tokenizer = gguf_tokenizer(
        write_gguf, HARMONY, eos_token_id="<|return|>", eot_token_id="<|end|>"
    )
    assert names_of(tokenizer) == ends


def test_a_format_shows_in_tokens_of_any_type(write_gguf: Any) -> None:
    """Some files mark the tokens of gpt-oss as user-defined, and its template writes them."""
    tokens = [*HARMONY, *byte_alphabet(), "ab"]
    values = {
        "tokens": tokens,
        "token_type": [USER_DEFINED] * 3 + [CONTROL] + [USER_DEFINED] * 2 + [NORMAL] * 257,
        "merges": ["a b"],
        "bos_token_id": None,
        "eos_token_id": None,
    }
    given = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    given["tokenizer.chat_template"] = "<|start|>{{ messages[0].content }}<|return|><|call|>"
    tokenizer = open_checkpoint(write_gguf(given)).load_tokenizer()
    assert names_of(tokenizer) == {"<|return|>", "<|call|>"}


@pytest.mark.parametrize("key", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_keys_of_ends(key: str, write_gguf: Any) -> None:
    tokenizer = gguf_tokenizer(write_gguf, ["<mine>"], **{f"{key}_token_id": "<mine>"})
    assert names_of(tokenizer) == {"<mine>"}


@pytest.mark.parametrize("key", ["fim_pre", "fim_suf", "fim_mid", "padding", "unknown"])
def test_keys_of_other_tokens(key: str, write_gguf: Any) -> None:
    tokenizer = gguf_tokenizer(write_gguf, ["<mine>"], **{f"{key}_token_id": "<mine>"})
    assert names_of(tokenizer) == set()


@pytest.mark.parametrize("name", ["</s>", "<|im_end|>", "<eos>"])
@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED])
def test_a_token_type_overrules_a_name(
    name: str, kind: int, write_gguf: Any, tmp_path: Path
) -> None:
    tokenizer = gguf_tokenizer(write_gguf, [name], kind)
    assert names_of(tokenizer) == set()
    assert tokenizer.decode([0]) == name
    assert names_of(folder_tokenizer(tmp_path, [name], special=False)) == set()
    # The id in the file wins.
    assert names_of(gguf_tokenizer(write_gguf, [name], kind, eos_token_id=name)) == {name}


def test_old_converters_marked_the_end_of_a_turn_as_user_defined(write_gguf: Any) -> None:
    """The chat template, which writes the token, shows that it ends turns."""
    names, template = ["<|im_end|>", "</s>"], "{{ messages[0].content }}<|im_end|>"
    tokenizer = gguf_tokenizer(write_gguf, names, USER_DEFINED, template=template)
    assert names_of(tokenizer) == {"<|im_end|>"}
    assert tokenizer.decode([0]) == ""


QWEN = {"eos_token": "<|im_end|>"}
LISTS: list[tuple[list[str], dict[str, Any], set[str]]] = [
    # gpt-oss: the list has no <|end|>
    (HARMONY, {"generation_config": {"eos_token_id": [260, 261]}}, {"<|return|>", "<|call|>"}),
    # Llama 3 without the end of a message
    (
        ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"],
        {"generation_config": {"eos_token_id": [256, 257]}},
        {"<|end_of_text|>", "<|eot_id|>"},
    ),
    # GLM: the next turn of the user
    (
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
        {"config": {"eos_token_id": [256, 257, 258]}},
        {"<|endoftext|>", "<|user|>", "<|observation|>"},
    ),
    # one id says less than a list: first files of Llama 3, Gemma 2
    (
        ["<|end_of_text|>", "<|eot_id|>"],
        {"generation_config": {"eos_token_id": 256}},
        {"<|end_of_text|>", "<|eot_id|>"},
    ),
    # all lists count, and so does the tokenizer's end
    (
        ["<|endoftext|>", "<|im_end|>", "<mine>", "</s>"],
        {
            "tokenizer_config": QWEN,
            "config": {"eos_token_id": 256},
            "generation_config": {"eos_token_id": [258]},
        },
        {"<|endoftext|>", "<|im_end|>", "<mine>"},
    ),
    # the text part of a multimodal model
    (
        ["<a>", "<b>", "<c>"],
        {"config": {"eos_token_id": None, "text_config": {"eos_token_id": [256, 257]}}},
        {"<a>", "<b>"},
    ),
    (
        ["<a>", "<b>", "<c>"],
        {"config": {"eos_token_id": 258, "text_config": {"eos_token_id": [256, 257]}}},
        {"<c>"},
    ),
    # a list without a valid id says nothing
    (["</s>"], {"generation_config": {"eos_token_id": [10**6, "x"]}}, {"</s>"}),
]


@pytest.mark.parametrize(("names", "files", "ends"), LISTS)
def test_lists_win_over_names(
    names: list[str], files: dict[str, Any], ends: set[str], tmp_path: Path
) -> None:
    assert names_of(folder_tokenizer(tmp_path, names, **files)) == ends


def test_our_list_in_a_gguf_file(write_gguf: Any) -> None:
    values = {END_LIST: [1], "tokenizer.ggml.eos_token_id": None}
    assert names_of(open_checkpoint(write_gguf(values)).load_tokenizer()) == {"<|im_start|>"}
    with pytest.raises(FormatError, match="outside of the vocabulary"):
        open_checkpoint(write_gguf({END_LIST: [264]})).load_tokenizer()


@pytest.mark.parametrize("key", ["bos", "eos", "eot", "eom", "fim_pad"])
@pytest.mark.parametrize("token_id", [264, 2**32 - 1])
def test_an_id_out_of_range_means_none(
    key: str, token_id: int, write_gguf: Any, caplog: pytest.LogCaptureFixture
) -> None:
    change = {"tokenizer.ggml.eos_token_id": None, f"tokenizer.ggml.{key}_token_id": token_id}
    tokenizer = open_checkpoint(write_gguf(change)).load_tokenizer()
    assert names_of(tokenizer) == {"<|endoftext|>", "<|im_end|>"}
    assert (tokenizer.eos_id, tokenizer.bos_id) == (None, None if key == "bos" else 1)
    assert f"tokenizer.ggml.{key}_token_id is {token_id:,}" in caplog.text


def test_generation_ends_at_the_end(write_gguf: Any) -> None:
    """Every token of a tiny vocabulary but the ends is an ordinary token."""
    names = {"tokenizer.ggml.token_type": [4, 4, 4] + [1] * 261}
    params = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[0])
    for change, num_tokens in (({}, 1), (names, 4)):
        with LLM(write_gguf(change), backend="reference", max_model_len=16) as llm:
            assert len(llm.generate("a", params)[0].outputs[0].token_ids) == num_tokens
