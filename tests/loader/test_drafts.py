"""Draft models, self-drafting layers and Medusa heads of a model on disk."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace import LLM, SamplingParams
from headrace.backend import compile_program, lower_program
from headrace.backend.cpu.executable import CpuExecutable
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.medusa import read_heads
from headrace.config import KvConfig
from headrace.errors import FormatError, MemoryLimitError, RequestError
from headrace.loader.drafts import (
    DraftCheckpoints,
    compile_draft_models,
    compile_drafter,
    open_draft_checkpoints,
    target_program,
)
from headrace.loader.options import engine_config
from headrace.measure.calibrate import calibrate
from headrace.model import trace_model
from headrace.planner.fit import RUNTIME_BYTES
from tests.checkpoint.conftest import SHAPE, SPECIAL, metadata, write_gguf  # noqa: F401 - a fixture
from tests.drafters import DRAFTERS, random_drafter, random_eagle1, write_drafter, write_eagle1

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
VOCAB = len(metadata("llama")["tokenizer.ggml.tokens"])
OPTIONS = {"max_model_len": 128, "kv_blocks": 8, "adaptive_speculation": False}


@pytest.fixture
def model(write_gguf: Any) -> Path:  # noqa: F811
    path: Path = write_gguf()
    return path.rename(path.with_name("target.gguf"))


def heads(**change: Any) -> dict[str, Any]:
    rng, dim = np.random.default_rng(0), SHAPE["dim"]
    shapes = {"0.linear.weight": (dim, dim), "0.linear.bias": (dim,), "1.weight": (VOCAB, dim)}
    made = {
        f"{i}.{name}": rng.normal(0, 0.1, shape).astype(np.float16)
        for i in range(3)
        for name, shape in shapes.items()
    }
    return {name: value for name, value in (made | change).items() if value is not None}


def options_for(how: str, model: Path) -> dict[str, Any]:
    if how == "medusa":
        save_file(heads(), model.with_name("heads.safetensors"))
    return {
        "draft_model": {"draft_model": str(model)},
        "self_draft": {"draft_layers": 1},
        "medusa": {"medusa_heads": str(model.with_name("heads.safetensors"))},
    }[how]


@pytest.mark.parametrize("how", ["draft_model", "self_draft", "medusa"])
@pytest.mark.parametrize("width", [1, 2])
def test_drafts_from_file_to_text(model: Path, how: str, width: int) -> None:
    with (
        LLM(str(model), **OPTIONS) as plain,
        LLM(
            str(model), proposer=how, draft_width=width, **OPTIONS, **options_for(how, model)
        ) as llm,
    ):
        prompts = ["hello", "hell w", "he"]
        for params in (GREEDY, SamplingParams(seed=3, max_tokens=20)):
            assert [r.outputs for r in llm.generate(prompts, params)] == [
                r.outputs for r in plain.generate(prompts, params)
            ]
        stats = llm.stats()
        assert (
            stats.drafted > 0
            and stats.proposer_failures == 0
            and stats.blocks_free == stats.blocks_total
        )
        assert (
            how != "draft_model" or width > 1 or stats.accepted == stats.drafted
        )  # the model itself


def eagle3_options(model: Path, layout: str, vocab: int = 0, **changes: Any) -> dict[str, Any]:
    """Options for a random EAGLE-3 drafter of the model."""
    target = open_checkpoint(model)
    drafter = random_drafter((target.spec, dict(target.tensors)), vocab=vocab)
    folder = write_drafter(model.with_name(f"{layout}-{vocab}"), drafter, layout, **changes)
    return {"draft_model": str(folder), "proposer": "draft_model"}


@pytest.mark.parametrize("layout", ["authors", "speculators"])
@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"draft_width": 2}])
def test_eagle3_drafts_from_file_to_text(model: Path, layout: str, options: dict[str, Any]) -> None:
    own = options | eagle3_options(model, layout, vocab=100)
    plain_options = {name: value for name, value in options.items() if name != "draft_width"}
    with (
        LLM(str(model), **OPTIONS, **plain_options) as plain,
        LLM(str(model), **OPTIONS, **own) as llm,
    ):
        prompts = ["hello", "hell w", "he"]
        for params in (GREEDY, SamplingParams(seed=3, max_tokens=20)):
            assert [r.outputs for r in llm.generate(prompts, params)] == [
                r.outputs for r in plain.generate(prompts, params)
            ]
        stats = llm.stats()
    assert stats.drafted > 0 and stats.proposer_failures == 0


def test_eagle3_with_rejection_sampling(model: Path) -> None:
    own = eagle3_options(model, "speculators", vocab=100) | {"acceptance_method": "rejection"}
    with LLM(str(model), **OPTIONS, **own) as llm:
        llm.generate(["hello", "he"], SamplingParams(seed=3, max_tokens=20))
        stats = llm.stats()
    assert stats.drafted > 0 and stats.proposer_failures == 0


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_eagle_on_the_gpu_backend(model: Path, kind: str) -> None:
    options = {**OPTIONS, "backend": "cuda", "max_num_seqs": 2, "max_num_batched_tokens": 8}
    params, tokens = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), []
    drafts = eagle3_options(model, "authors", vocab=100)
    if kind == "eagle1":
        target = open_checkpoint(model)
        drafter = random_eagle1((target.spec, dict(target.tensors)))
        folder = write_eagle1(model.with_name("eagle1"), drafter, "authors")
        drafts["draft_model"] = str(folder)
    for own in ({}, drafts):
        with LLM(str(model), **options, **own) as llm:
            tokens.append(llm.generate("hello", params)[0].outputs[0].token_ids)
            stats = llm.stats()
        assert stats.proposer_failures == 0 and (stats.drafted > 0) == bool(own)
    assert tokens[0] == tokens[1]


def test_calibrate_compares_all_drafters(
    model: Path,
    write_gguf: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An EAGLE-3 drafter, a model with other tokens, and Medusa heads."""
    monkeypatch.setattr("headrace.measure.drafters.ROUNDS", 1)
    monkeypatch.setattr("headrace.measure.drafters.BATCHES", (1, 3))
    own = eagle3_options(model, "authors", vocab=100)
    other = swapped_tokens(write_gguf, 40, 41)
    heads = options_for("medusa", model)["medusa_heads"]
    found = calibrate(
        str(model),
        draft_model=[own["draft_model"], str(other)],
        medusa_heads=heads,
        layers=[1],
        prompt="he",
        tokens=16,
        max_depth=3,
        threads=1,
    ).drafters
    assert [each.drafter.name for each in found][:4] == [
        "suffix tree",
        own["draft_model"],
        str(other),
        "Medusa heads",
    ]
    assert all(each.draft_seconds > 0 for each in found[1:4])
    assert found[2].acceptance[0] > 0.3 and len(found[1].acceptance) == 3


def test_eagle3_memory_counts(model: Path) -> None:
    own = eagle3_options(model, "authors", vocab=100)
    config = engine_config({"backend": "cpu"} | own)
    target = open_checkpoint(model)
    drafts = open_draft_checkpoints(config, target, target.load_tokenizer)
    assert drafts.taps == (0, 1, 1) and drafts.drafter
    assert drafts.weight_bytes("cpu", target) > drafts.drafter.tensors["fuse"].nbytes // 4
    use = drafts.kv_use(config)
    assert use and len(use.groups) == 1 and use.max_rows > 512


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        (
            {"tensor_parallel_size": 2, "backend": "cuda"},
            {},
            "works on several ranks with backend 'cpu' alone, and backend is 'cuda'; set tensor_",
        ),
        ({}, {"vocab_size": 7}, "vocabulary size 7, and this model's is"),
    ],
)
def test_eagle3_drafters_that_do_not_suit_raise(
    model: Path, options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    own = eagle3_options(model, "authors", **changes)
    with pytest.raises(RequestError) as error:
        LLM(str(model), **OPTIONS, **own, **options)
    assert message in str(error.value)


def test_drafts_on_the_gpu_backend(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts use the backend's own block size, and CUDA graphs of their steps."""
    monkeypatch.setattr("headrace.backend.cuda.stream.HostStream.has_graphs", True)
    monkeypatch.setattr("headrace.backend.cuda.step_shape.MAX_GRAPH_ROWS", 2)
    options = {**OPTIONS, "backend": "cuda", "max_num_seqs": 2, "max_num_batched_tokens": 8}
    params, tokens = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), {}
    for how in ("off", "draft_model", "self_draft", "medusa"):
        own = {} if how == "off" else options_for(how, model)
        with LLM(str(model), **options, **own, proposer=how) as llm:
            tokens[how] = llm.generate("hello", params)[0].outputs[0].token_ids
            stats = llm.stats()
        assert stats.proposer_failures == 0 and (stats.drafted > 0) == (how != "off")
    assert len(set(map(tuple, tokens.values()))) == 1


@pytest.mark.parametrize("how", ["draft_model", "self_draft", "medusa"])
def test_close_frees_draft_models(model: Path, how: str) -> None:
    llm = LLM(str(model), proposer=how, **OPTIONS, **options_for(how, model))
    llm.generate("hello", GREEDY)
    proposer = weakref.ref(llm._engine._speculation._guards[how]._proposer)
    assert proposer() is not None
    llm.close()
    gc.collect()
    assert proposer() is None  # the only one that holds what drafts


def test_draft_model_memory_counts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = open_checkpoint(model)
    weights = lower_program(
        "cpu", trace_model(target.spec, target.tensors), target.tensors
    ).weight_bytes
    monkeypatch.setattr(
        "headrace.loader.memory.available_memory", lambda: RUNTIME_BYTES + int(1.9 * weights)
    )
    LLM(str(model), max_model_len=32).close()
    with pytest.raises(MemoryLimitError, match="the model is too large"):
        LLM(str(model), max_model_len=32, proposer="draft_model", draft_model=str(model))


def test_medusa_memory_equals_its_weights(model: Path) -> None:
    """The executables attached to the target hold exactly the estimated bytes."""
    config = engine_config({"backend": "cpu", "proposer": "medusa"} | options_for("medusa", model))
    target = open_checkpoint(model)
    kv = KvConfig((2,))
    draft_checkpoints = open_draft_checkpoints(config, target, target.load_tokenizer)
    executable = compile_program("cpu", target_program(config, target), target.tensors, kv, 1)
    assert isinstance(executable, CpuExecutable)
    before = executable.plan.weight_bytes
    assert before == executable.program.weight_bytes
    compile_draft_models(config, draft_checkpoints, target, executable, kv)
    assert (
        executable.plan.weight_bytes - before == draft_checkpoints.weight_bytes("cpu", target) > 0
    )


def swapped_tokens(write_gguf: Any, first: int, second: int) -> Path:  # noqa: F811
    """The tiny model with two tokens of its tokenizer in each other's place."""
    tokens = list(metadata("llama")["tokenizer.ggml.tokens"])
    tokens[first], tokens[second] = tokens[second], tokens[first]
    path: Path = write_gguf({"tokenizer.ggml.tokens": tokens})
    return path.rename(path.with_name("swapped.gguf"))


@pytest.mark.parametrize("options", [{}, {"draft_width": 2}, {"acceptance_method": "rejection"}])
def test_draft_model_with_other_tokens_drafts(
    model: Path,
    write_gguf: Any,  # noqa: F811
    options: dict[str, Any],
) -> None:
    """Tokens are those of plain decoding, and most drafts are right: two tokens change places."""
    draft = swapped_tokens(write_gguf, len(SPECIAL) + 30, len(SPECIAL) + 31)
    own = {"draft_model": str(draft), "proposer": "draft_model"}
    with LLM(str(model), **OPTIONS) as plain, LLM(str(model), **OPTIONS, **own, **options) as llm:
        for params in (GREEDY, SamplingParams(seed=3, max_tokens=20)):
            got = llm.generate(["hello", "he"], params)
            if "acceptance_method" not in options:
                assert [r.outputs for r in got] == [
                    r.outputs for r in plain.generate(["hello", "he"], params)
                ]
        stats = llm.stats()
    assert stats.drafted > 0 and stats.accepted > 0 and stats.proposer_failures == 0


def test_draft_model_with_other_tokens_on_the_gpu_backend(model: Path, write_gguf: Any) -> None:  # noqa: F811
    own = {"draft_model": str(swapped_tokens(write_gguf, 40, 41)), "proposer": "draft_model"}
    options = {**OPTIONS, "backend": "cuda", "max_num_seqs": 2, "max_num_batched_tokens": 8}
    requests = [GREEDY, SamplingParams(seed=3)]
    tokens = []
    for drafts in ({}, own):
        with LLM(str(model), **options, **drafts) as llm:
            params = [replace(each, max_tokens=4, ignore_eos=True) for each in requests]
            results = llm.generate(["hello", "he"], params)
            tokens.append([result.outputs[0].token_ids for result in results])
            stats = llm.stats()
        assert stats.proposer_failures == 0 and (stats.drafted > 0) == bool(drafts)
    assert tokens[0] == tokens[1]


def test_draft_model_with_other_tokens_on_ranks(model: Path, write_gguf: Any) -> None:  # noqa: F811
    own = {"draft_model": str(swapped_tokens(write_gguf, 40, 41)), "proposer": "draft_model"}
    params, tokens = SamplingParams(seed=3, max_tokens=12), []
    for options in ({}, own):
        with LLM(str(model), **OPTIONS, **options, tensor_parallel_size=2) as llm:
            tokens.append(llm.generate("hello", params)[0].outputs[0].token_ids)
            stats = llm.stats()
    assert tokens[0] == tokens[1]
    assert stats.accepted > 0 and stats.proposer_failures == 0


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafters_pack_the_tensors_of_the_model_once(model: Path, kind: str) -> None:
    """The programs of a drafter have the estimated bytes, without those of lent tensors."""
    target = open_checkpoint(model)
    drafter = DRAFTERS[kind]((target.spec, dict(target.tensors)))
    copies = {name: replace(tensor) for name, tensor in drafter.tensors.items()}
    nbytes = []
    for each in (drafter, replace(drafter, tensors=copies)):
        drafts = DraftCheckpoints(drafter=each)
        program = target_program(engine_config({"backend": "cpu"}), target, drafts.taps)
        kv = KvConfig((8,), 32)
        executable = compile_program("cpu", program, target.tensors, kv, 1)
        attached = compile_drafter(each, target.spec, executable, kv, 2).from_itself.executable
        assert isinstance(attached, CpuExecutable)
        assert attached.plan.weight_bytes == drafts.weight_bytes("cpu", target)
        nbytes.append(attached.plan.weight_bytes)
    matrix = lower_program("cpu", program, target.tensors).weights["embed"].nbytes
    assert nbytes[1] - nbytes[0] >= matrix > 0


def padded(write_gguf: Any, change: int, tied: bool, **options: Any) -> Path:  # noqa: F811
    """The tiny model with another number of rows than its tokenizer has tokens."""
    rng = np.random.default_rng(1)
    names = ["token_embd.weight"] if tied else ["token_embd.weight", "output.weight"]
    rows = rng.normal(size=(VOCAB + 64, SHAPE["dim"])).astype(np.float32)
    path: Path = write_gguf(weights=dict.fromkeys(names, rows[: VOCAB + change]), **options)
    return path.rename(path.with_name(f"{change}.gguf"))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [(3, 64), (64, 3), (0, 5)])
@pytest.mark.parametrize(("acceptance", "width"), [("exact", 1), ("exact", 2), ("rejection", 1)])
def test_drafts_of_another_padding(
    write_gguf: Any,  # noqa: F811
    tied: bool,
    rows: tuple[int, int],
    acceptance: str,
    width: int,
) -> None:
    """Tokens are the same with and without drafts, and the model accepts its own weights."""
    target, draft = (padded(write_gguf, change, tied) for change in rows)
    options = OPTIONS | {"draft_model": str(draft), "acceptance_method": acceptance}
    own = options | {"proposer": "draft_model", "draft_width": width}
    with LLM(str(target), **OPTIONS) as plain, LLM(str(target), **own) as llm:
        for params in (GREEDY, SamplingParams(seed=3, max_tokens=20)):
            got = llm.generate(["hello", "he"], params)
            if acceptance == "exact":
                assert [r.outputs for r in got] == [
                    r.outputs for r in plain.generate(["hello", "he"], params)
                ]
        stats = llm.stats()
    assert stats.drafted > 0 and stats.accepted > 0 and stats.proposer_failures == 0


def test_padding_is_never_drafted(write_gguf: Any) -> None:  # noqa: F811
    target, draft = (padded(write_gguf, change, True) for change in (64, 0))
    opened = open_checkpoint(target)
    config = engine_config({"proposer": "draft_model", "draft_model": str(draft)})
    found = open_draft_checkpoints(config, opened, opened.load_tokenizer).draft
    assert found and found.spec.vocab_size == VOCAB + 64
    bias = found.tensors["head_bias"].dequantise()
    assert (bias[:VOCAB] == 0).all() and (bias[VOCAB:] < -1e8).all()
    small = open_checkpoint(draft).tensors["embed"].dequantise()
    np.testing.assert_array_equal(found.tensors["embed"].dequantise()[:VOCAB], small)


class TestMedusaHeads:
    def read(self, model: Path, stored: dict[str, Any]) -> dict[str, Any]:
        file = model.with_name("heads.safetensors")
        save_file(stored, file)
        return read_heads(file, open_checkpoint(model).spec, VOCAB - 2)

    def test_medusa_heads_with_and_without_a_prefix(self, model: Path) -> None:
        plain = self.read(model, heads())
        assert (
            sorted(plain)[:3]
            == ["medusa.0.0.linear.bias", "medusa.0.0.linear.weight", "medusa.0.1.weight"]
            and len(plain) == 9
        )
        prefixed = self.read(
            model, {f"medusa_head.{name}": value for name, value in heads().items()}
        )
        assert prefixed.keys() == plain.keys()

    @pytest.mark.parametrize("rows", [VOCAB - 2, VOCAB + 5])
    def test_medusa_heads_of_another_padding(self, model: Path, rows: int) -> None:
        own = np.arange(rows * SHAPE["dim"], dtype=np.float16).reshape(rows, -1) / 4096
        found = self.read(model, heads(**{"1.1.weight": own}))["medusa.1.1.weight"]
        assert found.shape == (VOCAB, SHAPE["dim"])
        kept = min(rows, VOCAB)
        np.testing.assert_array_equal(found.dequantise()[:kept], own[:kept])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"1.0.linear.bias": None}, "missing or unknown tensors 1.0.linear.bias"),
            (
                {"3.0.linear.bias": np.zeros(SHAPE["dim"], np.float16)},
                "missing or unknown tensors 3.0.linear.weight, 3.1.weight",
            ),
            (
                {"0.1.linear.weight": np.zeros((2, 2), np.float16)},
                "tensors 0.1.linear.bias, 0.1.weight, 1.1.linear.bias",
            ),
            (
                {"2.1.weight": np.zeros((VOCAB - 3, SHAPE["dim"]), np.float16)},
                f"tensor 2.1.weight has shape [{VOCAB - 3}, {SHAPE['dim']}], but this model needs",
            ),
            (
                {"2.1.weight": np.zeros((VOCAB, 3), np.float16)},
                f"tensor 2.1.weight has shape [{VOCAB}, 3], but this model needs",
            ),
        ],
    )
    def test_malformed_medusa_heads_raise(
        self, model: Path, change: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(FormatError) as error:
            self.read(model, heads(**change))
        assert message in str(error.value)

    def test_medusa_file_without_heads_raises(self, model: Path) -> None:
        with pytest.raises(
            FormatError, match=r"unknown tensors 0.0.linear.bias, 0.0.linear.weight, 0.1.weight"
        ):
            self.read(model, {})
