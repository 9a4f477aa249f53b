"""Texts for evaluation and calibration, cut into pieces that begin as the model's prompts do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, processors

import headrace
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.tokenizer_hf import tokenizer_from_folder
from headrace.convert.quality import QualityMeter
from headrace.convert.texts import calibration_pieces, read_text, split_pieces, text_pieces
from headrace.errors import RequestError
from tests.checkpoint.conftest import WriteGguf, write_gguf  # noqa: F401 - a fixture
from tests.families import logits_of, save_model

LETTERS = [chr(ord("!") + i) for i in range(90)]
BOS, PREFIX, EOS = 98, 99, 100
TEXT = "".join(np.random.default_rng(0).choice(LETTERS, 300))


def save_tokenizer(folder: Path, template: str) -> None:
    """A tokenizer with letters for tokens, and a post-processor that surrounds a text."""
    folder.mkdir(exist_ok=True)
    names = {"<s>": BOS, "<p>": PREFIX, "</s>": EOS}
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)}
    fill = {f"<{i}>": i for i in range(len(LETTERS), BOS)}
    tokenizer = Tokenizer(models.BPE(vocabulary | fill | names, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(names))
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(names.items())
        )
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        ("", ()),
        ("$A </s>", ()),
        ("<s> $A", (BOS,)),
        ("<s> $A </s>", (BOS,)),
        ("<s> <p> $A", (BOS, PREFIX)),
    ],
)
def test_pieces_begin_with_what_the_tokenizer_adds(
    template: str, prefix: tuple[int, ...], tmp_path: Path
) -> None:
    save_tokenizer(tmp_path, template)
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.prefix_ids == prefix
    pieces = text_pieces(tokenizer, TEXT, 50, 100, "the text")
    step = 50 - len(prefix)
    plain = tokenizer.encode(TEXT, add_special=False)
    assert pieces == [[*prefix, *plain[:step]], [*prefix, *plain[step : 2 * step]]]


@pytest.mark.parametrize("variant", ["llama3-gqa", "gemma2", "gemma3"])
@pytest.mark.parametrize("template", ["<s> $A", "<s> <p> $A", ""])
def test_nll_equals_transformers(variant: str, template: str, tmp_path: Path) -> None:
    model = save_model(variant, tmp_path)
    save_tokenizer(tmp_path, template)
    (tmp_path / "text").write_text(TEXT)
    prefix = tokenizer_from_folder(tmp_path).prefix_ids
    step = 64 - len(prefix)
    letters = [LETTERS.index(letter) for letter in TEXT]

    losses = []
    for i in range(2):
        piece = [*prefix, *letters[i * step : (i + 1) * step]]
        logits = logits_of(model, piece).astype(np.float64)
        log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        scored = range(max(1, len(prefix)), len(piece))
        losses += [-log_probabilities[position - 1, piece[position]] for position in scored]

    (row,) = headrace.evaluate(
        str(tmp_path),
        text=tmp_path / "text",
        tokens=128,
        length=64,
        backend="cpu",
        threads=1,
        kv_dtype="f32",
        activations="f32",
    )
    assert row.quality.tokens == len(losses)
    assert row.quality.nll == pytest.approx(np.mean(losses), abs=2e-4)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_eval_reads_a_gguf_file_as_generate_does(
    adds_bos: bool,
    write_gguf: WriteGguf,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = str(write_gguf({"tokenizer.ggml.add_bos_token": adds_bos}))
    text = "the quick brown fox jumps over the lazy dog"
    (tmp_path / "text").write_text(text)
    (row,) = headrace.evaluate(path, text=tmp_path / "text", length=128, threads=1)
    params = headrace.SamplingParams(max_tokens=1, prompt_logprobs=0)
    with headrace.LLM(path, threads=1, backend="cpu") as llm:
        (result,) = llm.generate([text], params)
    scores = [-next(iter(scored.values())).logprob for scored in result.prompt_logprobs if scored]
    assert row.quality.tokens == len(scores)
    assert row.quality.nll == pytest.approx(np.mean(scores), abs=1e-3)


def test_calibration_pieces_begin_with_the_prefix(tmp_path: Path) -> None:
    save_model("gemma3", tmp_path)
    save_tokenizer(tmp_path, "<s> $A")
    (tmp_path / "text").write_text(TEXT)
    pieces = calibration_pieces(open_checkpoint(tmp_path), tmp_path / "text", 32, 96)
    assert [piece[0] for piece in pieces] == [BOS] * 3
    assert [len(piece) for piece in pieces] == [32] * 3


def test_profile_and_bench_begin_with_the_prefix(
    write_gguf: WriteGguf,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headrace.config import EngineConfig
    from headrace.engine.engine import Engine
    from headrace.measure.bench import Bench
    from headrace.measure.phase_timer import PhaseTimer
    from headrace.program.op import StepSize

    path = write_gguf({"tokenizer.ggml.add_bos_token": True})
    config = EngineConfig(backend="cpu", threads=1)
    timer = PhaseTimer(str(path), open_checkpoint(path), config, 4)
    batch = timer._batch(StepSize(((0, 3), (5, 2)), 2, 0))
    timer.close()
    assert batch.tokens.tolist()[0] == 1 and 1 not in batch.tokens.tolist()[1:]

    prompts: list[list[int]] = []
    submit = Engine.add_request

    def record(engine: Engine, prompt: list[int], *others: Any) -> str:
        prompts.append(prompt)
        return submit(engine, prompt, *others)

    monkeypatch.setattr(Engine, "add_request", record)
    with Bench(str(path), config) as bench:
        bench.run(2, 7, 1)
    assert [prompt[0] for prompt in prompts] == [1, 1]
    assert [len(prompt) for prompt in prompts] == [7, 7]


def test_prefix_of_a_vocabulary_without_letters(tmp_path: Path) -> None:
    names = {"<s>": 0, "</s>": 1}
    tokenizer = Tokenizer(models.BPE(names, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(names))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=list(names.items())
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_from_folder(tmp_path).prefix_ids == (0,)


@pytest.mark.parametrize(
    ("template", "text", "length", "message"),
    [
        ("", "", 8, "the text has 0 tokens; use a longer one"),
        ("", "a", 8, "the text has 1 token; use a longer one"),
        ("<s> $A", "", 8, "the text has 0 tokens; use a longer one"),
        ("<s> <p> $A", "abc", 2, "length is 2, and each piece begins with 2 tokens .* at least 3"),
    ],
)
def test_text_pieces_refuses(
    template: str, text: str, length: int, message: str, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path, template)
    with pytest.raises(RequestError, match=message):
        text_pieces(tokenizer_from_folder(tmp_path), text, length, 100, "the text")


@given(
    count=st.integers(1, 60),
    length=st.integers(4, 20),
    tokens=st.integers(1, 80),
    prefix=st.integers(0, 3),
)
def test_split_pieces(count: int, length: int, tokens: int, prefix: int) -> None:
    ids, added = list(range(100, 100 + count)), list(range(prefix))
    pieces = split_pieces(ids, length, tokens, added)
    assert all(piece[:prefix] == added and len(piece) <= length for piece in pieces)
    text = [token for piece in pieces for token in piece[prefix:]]
    assert text == ids[: len(text)] and text
    if len(pieces) > 1:
        assert sum(map(len, pieces)) <= tokens and all(len(piece) == length for piece in pieces)


def test_quality_without_the_prefix() -> None:
    """Tokens of a prefix are given, so they have no loss, in any chunks."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((10, 7)).astype(np.float32)
    piece = rng.integers(0, 7, 10).tolist()
    for prefix in range(5):
        for cut in (1, 2, 9):
            meter = QualityMeter(prefix)
            meter.add(piece, iter([rows[:cut], rows[cut:]]), iter([rows[:cut], rows[cut:]]))
            expected = [-rows[i - 1, piece[i]] for i in range(max(1, prefix), 10)]
            quality = meter.quality()
            assert quality.tokens == len(expected) and quality.kl == 0
            assert quality.nll == pytest.approx(np.mean(expected), rel=1e-6)


def test_calibration_and_evaluation_texts(tmp_path: Path) -> None:
    ours, others = read_text(None, "evaluation"), read_text(None, "calibration")
    assert 50_000 < len(ours) < len(others) and ours[:2000] not in others
    (tmp_path / "a.txt").write_text("naïve")
    assert read_text(tmp_path / "a.txt", "evaluation") == "naïve"
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xff")
    for name in ("b.txt", "missing.txt"):
        with pytest.raises(RequestError, match=name):
            read_text(tmp_path / name, "evaluation")
