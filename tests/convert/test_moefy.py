"""MoEfication: experts from the neurons of a dense FFN."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint.load import open_checkpoint
from headrace.cli.main import main
from headrace.config import EngineConfig
from headrace.convert.folder.writer import plan_folder, write_folder
from headrace.convert.gguf.writer import plan_gguf, write_gguf
from headrace.convert.moefied_quality import best_layers
from headrace.convert.moefy import (
    Moefication,
    fit_down,
    fit_router,
    moefied_layers,
    moefied_spec,
    with_experts,
)
from headrace.convert.neuron_groups import group_neurons
from headrace.convert.source_model import SourceModel, open_source_model
from headrace.errors import RequestError, UnsupportedModelError
from headrace.loader.mode_price import losses, mode_price
from headrace.model.spec import ExpertSpec
from headrace.planner.prices import parse_price
from headrace.quant.arrays import Floats
from tests.checkpoint.conftest import write_tiny_gguf
from tests.families import save_model
from tests.folders import TOKENS, backends, logits_of
from tests.tiny import tiny_model

PIECES = [[(7 * i + 3 * j) % 90 for i in range(64)] for j in range(4)]


def moefied(source: SourceModel, experts: int, active: int, **others: object) -> SourceModel:
    options = replace(Moefication(experts=experts, active=active), **others)  # type: ignore[arg-type]
    return with_experts(
        source, options, moefied_layers(source, options, PIECES, 1, lambda done: None)
    )


def dense_model(variant: str, folder: Path) -> SourceModel:
    save_model(variant, folder)
    return open_source_model(folder)


def to_folder(source: SourceModel, out: Path) -> Path:
    plan = plan_folder(source, None, (), "F32")
    write_folder(source, out, plan, source.checkpoint.tensors, ())
    return out


def to_gguf(source: SourceModel, out: Path) -> Path:
    write_gguf(source, out, plan_gguf(source, "F32"), {}, lambda done: None)
    return out


def planted(groups: int, width: int, tokens: int = 512) -> Floats:
    """Hidden rows in which one group is large on every token, and one other at a time."""
    rng = np.random.default_rng(0)
    sizes = np.full((tokens, groups), 0.05)
    sizes[:, 0] = 2
    sizes[np.arange(tokens), rng.integers(1, groups, tokens)] = 1
    hidden = sizes[:, :, None] * rng.choice([-1, 1], (tokens, groups, width))
    noise = 0.01 * rng.standard_normal((tokens, groups * width))
    return (hidden.reshape(tokens, -1) + noise).astype(np.float32)


def test_neurons_that_are_active_together_are_grouped() -> None:
    order = np.random.default_rng(1).permutation(80)
    hidden = planted(10, 8)[:, order]
    groups = group_neurons(hidden, np.ones(80, np.float32), 10, 1)
    assert set(order[groups.shared] // 8) == {0}
    found = [set(order[neurons] // 8) for neurons in groups.routed]
    assert sorted(map(tuple, found)) == [(i,) for i in range(1, 10)]


def test_groups_of_noise_have_equal_sizes() -> None:
    hidden = np.random.default_rng(2).standard_normal((300, 96)).astype(np.float32)
    groups = group_neurons(hidden, np.ones(96, np.float32), 8, 2)
    assert [len(neurons) for neurons in groups.routed] == [12] * 6
    assert sorted(np.concatenate([groups.shared, *groups.routed])) == list(range(96))


def test_the_router_prefers_the_largest_output() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((400, 16)).astype(np.float32)
    norms = (5 + x @ rng.standard_normal((16, 6))).clip(0.1).astype(np.float32)
    router = fit_router(x, norms)
    logits = x @ router.T
    assert np.abs(logits).max() <= 2.0**-10 * 1.001
    assert np.mean(logits.argmax(1) == norms.argmax(1)) > 0.7


def test_down_is_fitted_to_lost_output() -> None:
    rng = np.random.default_rng(4)
    hidden = rng.standard_normal((500, 32)).astype(np.float32)
    hidden[:, 16:] = hidden[:, :16] + 0.1 * hidden[:, 16:]
    used = hidden * (np.arange(32) < 16)
    lost = (hidden - used) @ rng.standard_normal((32, 8)).astype(np.float32)
    rest = lost - used @ fit_down(used, lost)
    assert np.linalg.norm(rest) < 0.5 * np.linalg.norm(lost)
    assert not fit_down(used, np.zeros_like(lost)).any()
    # A text of fewer tokens than neurons is fitted by the other product.
    few = fit_down(used[:20], lost[:20])
    twice = fit_down(np.tile(used[:20], (2, 1)), np.tile(lost[:20], (2, 1)))
    np.testing.assert_allclose(few, twice, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("variant", ["smollm2", "qwen2", "llama3-gqa"])
def test_all_active_equals_dense(variant: str, tmp_path: Path) -> None:
    """The weights of the router and of the shared expert's gate are folded into `down`."""
    source = dense_model(variant, tmp_path / "model")
    made = open_checkpoint(to_folder(moefied(source, 6, 6, shared=2), tmp_path / "out"))
    assert made.spec.architecture == "qwen2_moe"
    expected = logits_of(backends(source.checkpoint, "")[0], [TOKENS])
    for executable in backends(made, ""):
        computed = logits_of(executable, [TOKENS])
        assert np.linalg.norm(computed - expected) < 1e-3 * np.linalg.norm(expected)


def test_a_gguf_file_is_cut_as_well(tmp_path: Path) -> None:
    source = open_source_model(write_tiny_gguf(tmp_path / "model.gguf"))
    result = replace(moefied(source, 4, 3), note="half as many\nbytes")
    made = open_checkpoint(to_gguf(result, tmp_path / "out.gguf"))
    assert made.spec.experts == result.spec.experts
    assert made.notes == ("out.gguf: half as many bytes",)
    assert made.load_tokenizer().to_json() == source.checkpoint.load_tokenizer().to_json()


def test_layers_without_experts_keep_their_ffn(tmp_path: Path) -> None:
    source = dense_model("smollm2", tmp_path / "model")
    result = replace(moefied(source, 4, 2, layers=(1,)), note="x" * 999)
    made = open_checkpoint(to_folder(result, tmp_path / "out"))
    assert made.spec.experts and made.spec.experts.dense_layers == (0, 2)
    assert made.notes == ("out: " + "x" * 400,)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["mlp_only_layers"] == [0, 2]
    old = source.checkpoint.tensors["layers.0.down"].dequantise()
    assert np.array_equal(made.tensors["layers.0.down"].dequantise(), old)


def test_the_best_layers_lose_least() -> None:
    assert best_layers({0: 0.5, 1: 0.1, 2: 0.3, 3: 0.1}, 3) == (1, 2, 3)


def test_refusals(tmp_path: Path) -> None:
    dense, _ = tiny_model(0, ffn=96)
    cases = [
        (dense, Moefication(experts=5, active=2), "does not divide the 96 neurons"),
        (dense, Moefication(experts=4, active=5), "--active must be a whole number from 2 to 4"),
        (dense, Moefication(experts=4, active=2, shared=2), "--shared must be"),
        (dense, Moefication(experts=4, active=2, layers=(2,)), "names layer 2"),
        (replace(dense, gated_mlp=False), Moefication(experts=4, active=2), "SiLU gate"),
        (replace(dense, activation="gelu"), Moefication(experts=4, active=2), "SiLU gate"),
        (
            replace(dense, experts=ExpertSpec(num_experts=4, top_k=2, ffn_dim=96)),
            Moefication(experts=4, active=2),
            "has 4 experts already",
        ),
    ]
    for spec, options, reason in cases:
        with pytest.raises(RequestError, match=reason):
            moefied_spec(spec, options)
    source = dense_model("smollm2", tmp_path / "dense")
    with pytest.raises(RequestError, match="the text has one piece"):
        moefied_layers(source, Moefication(experts=4, active=2), PIECES[:1], 1, lambda done: None)
    source = dense_model("qwen3", tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="qk_norm would be none instead of head"):
        to_folder(moefied(source, 4, 2), tmp_path / "out")


def test_convert_cuts_the_best_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = write_tiny_gguf(tmp_path / "model.gguf"), tmp_path / "out.gguf"
    words = tmp_path / "text"
    words.write_text("the quick brown fox jumps over the lazy dog " * 20)
    command = ["convert", str(model), str(out), "--to", "f32", "--moefy", "4", "--active", "3"]
    text = ["--calibration", str(words), "--length", "32", "--threads", "1"]
    assert main([*command, "--moefy-layers", "1", *text]) == 0
    printed = capsys.readouterr().out
    assert "KL of experts in one layer alone" in printed and "; price: KL" in printed
    made = open_checkpoint(out)
    assert made.spec.experts and len(made.spec.experts.dense_layers) == made.spec.num_layers - 1
    assert "cut from" in made.notes[0] and made.loss in made.notes[0]
    price = parse_price(made.price)
    assert price and price.text == "text, before --to" and price.line in printed
    assert losses(EngineConfig(attention_window=64), made).startswith(f"{made.loss}; attends to")
    assert mode_price("out.gguf", EngineConfig(), made, made.load_tokenizer) == price.line

    for option in (["--active", "2"], ["--shared", "1"], ["--moefy-layers", "1"]):
        assert main(["convert", str(model), "new", "--to", "bf16", *option]) == 2
        assert f"{option[0]} needs --moefy" in capsys.readouterr().err
    assert main(["convert", str(model), "new", "--to", "bf16", "--moefy", "4"]) == 2
    assert "--moefy needs --active K" in capsys.readouterr().err
