"""Measures of a model's quality on a text."""

import json
import math
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli.main import main
from headrace.convert.matrices import quantisable
from headrace.convert.quality import QualityMeter, Scorer
from headrace.convert.spill_file import SpillFile
from headrace.errors import HeadraceError
from headrace.model import trace_model
from headrace.quant.format_names import named_format
from tests.convert.conversion import quantise
from tests.families import save_model
from tests.tiny import tiny_model

SPEC, TENSORS = tiny_model(2, dim=64, heads=4, kv_heads=2, ffn=96, vocab=61)
PIECES = [list(map(int, piece)) for piece in np.random.default_rng(0).integers(0, 61, (2, 150))]


def test_spill_file_disk_errors() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        with (
            SpillFile() as rows,
            pytest.raises(HeadraceError, match=r"a temporary file in .*: File too large"),
        ):
            rows.add(np.zeros((100, 100), np.float32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def said(tensors: Any, backend: str = "cpu", length: int = 150) -> list[Any]:
    scorer = Scorer(trace_model(SPEC, tensors), tensors, length, backend, 1, "f32")
    return [np.concatenate(list(scorer.log_probabilities(piece))) for piece in PIECES]


def test_log_probabilities_by_chunks() -> None:
    """A piece has more rows than are computed at a time; the reference backend confirms
    it.
    """
    for ours, truth in zip(said(TENSORS), said(TENSORS, "reference"), strict=True):
        assert ours.shape == (150, 61)
        np.testing.assert_allclose(ours, truth, atol=1e-4)
        np.testing.assert_allclose(np.exp(ours).sum(axis=1), 1, rtol=1e-5)


def test_nll_kl_and_agreement() -> None:
    names = quantisable(SPEC, TENSORS)
    p = said(TENSORS)
    q = said(quantise("rtn", SPEC, TENSORS, names, named_format("int3-g32")))
    judge = QualityMeter()
    for piece, mine, other in zip(PIECES, q, p, strict=True):
        judge.add(piece, iter([mine[:64], mine[64:]]), iter([other[:64], other[64:]]))
    quality = judge.quality()
    losses = [
        -mine[i, piece[i + 1]] for piece, mine in zip(PIECES, q, strict=True) for i in range(149)
    ]
    kl = [
        float((np.exp(a[i]) * (a[i] - b[i])).sum())
        for a, b in zip(p, q, strict=True)
        for i in range(149)
    ]
    assert quality.tokens == 298
    assert quality.nll == pytest.approx(np.mean(losses), rel=1e-5)
    assert quality.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert quality.kl == pytest.approx(np.mean(kl), rel=1e-4) and quality.kl_99 == pytest.approx(
        np.quantile(kl, 0.99), rel=1e-4
    )
    same = [a[i].argmax() == b[i].argmax() for a, b in zip(p, q, strict=True) for i in range(149)]
    assert quality.agreement == pytest.approx(np.mean(same))
    assert quality.kl > 0 and quality.agreement < 1


def test_finer_formats_are_nearer() -> None:
    names, truth = quantisable(SPEC, TENSORS), said(TENSORS)

    def divergence(name: str) -> float:
        judge = QualityMeter()
        for piece, mine, other in zip(
            PIECES,
            said(quantise("rtn", SPEC, TENSORS, names, named_format(name))),
            truth,
            strict=True,
        ):
            judge.add(piece, iter([mine]), iter([other]))
        kl = judge.quality().kl
        assert kl is not None
        return kl

    eight, four, three, two = (divergence(f"int{bits}-g32") for bits in (8, 4, 3, 2))
    assert eight < four < three < two


def test_quantisable_matrices() -> None:
    names = quantisable(SPEC, TENSORS)
    assert len(names) == 2 * 7 and not any(
        "embed" in name or "head" in name or "norm" in name for name in names
    )
    result = quantise("rtn", SPEC, TENSORS, names, named_format("int4-g32"))
    assert all(result[name] is TENSORS[name] for name in TENSORS.keys() - set(names))
    assert result.keys() == TENSORS.keys()


def test_spill_file_is_read_repeatedly() -> None:
    blocks = [
        np.random.default_rng(i).standard_normal((i + 1, 5)).astype(np.float32) for i in range(4)
    ]
    with SpillFile() as kept:
        for block in blocks:
            kept.add(block)
        for _ in range(2):
            assert all(np.array_equal(a, b) for a, b in zip(kept, blocks, strict=True))


def test_eval_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`headrace eval` on the default model: int8 is nearer than int3, and sizes are as
    expected.
    """
    assert (
        main(
            ["eval", "--tokens", "64", "--length", "64", "--formats", "int8-g64,int3-g64", "--json"]
        )
        == 0
    )
    whole, eight, three = json.loads(capsys.readouterr().out)["rows"]
    assert whole["quality"]["kl"] == 0 and whole["quality"]["agreement"] == 1
    assert 0 < eight["quality"]["kl"] < 0.1 < three["quality"]["kl"]
    assert abs(eight["bits"] - 8.25) < 0.02 * 8.25 and abs(three["bits"] - 3.25) < 0.02 * 3.25
    assert eight["weight_bytes"] > whole["weight_bytes"] > three["weight_bytes"]
    for reference in ("exact", "smollm2"):
        assert (
            main(
                [
                    "eval",
                    "--tokens",
                    "32",
                    "--length",
                    "32",
                    "--activations",
                    "f32",
                    "--reference",
                    reference,
                    "--json",
                ]
            )
            == 0
        )
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        # Float64 beside KV in bf16 and activations in float32; the model beside itself.
        assert (
            0 < row["quality"]["kl"] < 1e-3 if reference == "exact" else row["quality"]["kl"] == 0
        )
    assert main(["eval", "--formats", "int5"]) == 2
    assert "int5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "format"),
    [("gptq", "int3-g32"), ("awq", "int3-g32"), ("imatrix", "int3-g32"), ("smoothquant", "w8a8")],
)
def test_eval_and_convert_commands_with_methods(
    method: str, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a tiny model with letters for tokens, each method gives another model than
    rounding does, of the same size, and it can be written.
    """
    save_model("qwen2", tmp_path / "model")
    letters = [chr(ord("!") + i) for i in range(90)]
    model = {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(letters)}, "merges": []}
    decoder = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    (tmp_path / "model/tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model})
    )
    text = tmp_path / "text"
    text.write_text("".join(np.random.default_rng(0).choice(letters, 400)))
    learnt = ["--calibration", str(text), "--length", "64", "--calibration-tokens", "128"]
    judged = ["--text", str(text), "--tokens", "128", *learnt, "--json"]
    found = []
    for how in ("rtn", method):
        assert (
            main(["eval", str(tmp_path / "model"), *judged, "--formats", format, "--method", how])
            == 0
        )
        found.append(json.loads(capsys.readouterr().out)["rows"][1])
    assert found[0]["bits"] == found[1]["bits"]
    assert (
        all(0 < row["quality"]["kl"] < 0.5 for row in found)
        and found[0]["quality"]["kl"] != found[1]["quality"]["kl"]
    )
    out = tmp_path / "out"
    assert (
        main(
            [
                "convert",
                str(tmp_path / "model"),
                str(out),
                "--to",
                format,
                "--method",
                method,
                *learnt,
                *("--token-embedding-type", "f32", "--output-tensor-type", "f32"),
            ]
        )
        == 0
    )
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{out}: ")
    assert printed.out.endswith("embedding: F32, 0.0 MB\nhead: F32, 0.0 MB\n")
    assert printed.err == f"{method}: reads 128 tokens of a text\n"
    assert main(["eval", str(out), *judged]) == 0
    (again,) = json.loads(capsys.readouterr().out)["rows"]
    assert (
        again["quality"]["nll"] == pytest.approx(found[1]["quality"]["nll"], abs=2e-4)
        and again["bits"] == found[1]["bits"]
    )
