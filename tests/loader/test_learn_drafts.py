"""A drafter that learns while it serves: with a real engine and the real process of training."""

import gc
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.checkpoint.drafters import open_drafter
from headrace.checkpoint.load import open_checkpoint
from headrace.distil.draft_files import write_drafter
from headrace.distil.online_student import OnlineStudent
from headrace.errors import RequestError, UnsupportedModelError
from headrace.loader import learn_drafts
from headrace.loader.learn_drafts import KeptWeights
from headrace.remote.host import report_of
from headrace.server.metrics import Metrics
from headrace.speculation.learning import learner as learner_module
from headrace.speculation.learning import trainer_process
from headrace.speculation.learning.buffer import LearningBuffer
from headrace.stats import LearningStats
from tests.checkpoint.conftest import metadata, tensors, write_tiny_gguf
from tests.drafters import random_drafter, random_eagle1, write_eagle1
from tests.drafters import write_drafter as write_folder

VOCAB = len(metadata("llama")["tokenizer.ggml.tokens"])
OPTIONS = {
    "max_model_len": 128,
    "kv_blocks": 32,
    "threads": 1,
    "proposer": "draft_model",
    "adaptive_speculation": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
IN_FOREGROUND = "from headrace.distil.online import main; main(in_background=False)"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose next token depends mostly on the last one, so that a drafter can learn it."""
    scales = {"attn": 0.15, "ffn": 0.15}
    weights = {
        name: values * next((s for part, s in scales.items() if f".{part}" in name), 1.0)
        for name, values in tensors(VOCAB).items()
    }
    weights["output.weight"] = np.random.default_rng(5).normal(size=(VOCAB, 64)).astype(np.float32)
    return write_tiny_gguf(tmp_path / "target.gguf", weights=weights)


@pytest.fixture
def drafter(model: Path) -> Path:
    target = open_checkpoint(model)
    made = random_drafter((target.spec, dict(target.tensors)))
    return write_folder(model.with_name("drafter"), made, "authors")


@pytest.fixture(autouse=True)
def quick_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the lowest priority, a busy machine would never train."""
    command = (sys.executable, "-P", "-c", IN_FOREGROUND)
    monkeypatch.setattr(trainer_process, "COMMAND", command)
    monkeypatch.setattr(learn_drafts, "LEARNING_RATE", 5e-3)


def engine(model: Path, drafter: Path, learn: str = "on", **options: Any) -> LLM:
    own = {"draft_model": str(drafter), "learn_drafts": learn}
    return LLM(str(model), **OPTIONS | own | options)


def serve(llm: LLM, seed: int, params: SamplingParams = GREEDY, **options: Any) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    prompts: Any = [{"prompt_token_ids": rng.integers(3, VOCAB, 5).tolist()} for _ in range(4)]
    results = llm.generate(prompts, params, **options)
    return [list(result.outputs[0].token_ids) for result in results]


def learning(llm: LLM) -> LearningStats:
    return llm.stats().learning


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def trained(model: Path, drafter: Path, out: Path, steps: int = 30) -> Path:
    """Serve, then train on the windows of the engine, and write a drafter."""
    torch.set_num_threads(1)
    with engine(model, drafter) as llm:
        for seed in range(8):
            serve(llm, seed)
        learner = llm._engine.learner
        assert learner
        buffer: LearningBuffer = learner._buffer
        windows = [buffer.read(number) for number in range(1, buffer.written + 1)]
    student = OnlineStudent(open_drafter(drafter, open_checkpoint(model)), 5e-3)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        chosen = [windows[i] for i in rng.choice(len(windows), 4)]
        list(student.learn([window for window in chosen if window]))
        student.update()
    write_drafter(out, student.spec, student.module, student.tokens, {})
    return out


def test_acceptance_rises_and_no_token_changes(
    model: Path, drafter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole way: serve, learn in a process, swap, keep; then start again."""
    caplog.set_level(logging.INFO, "headrace.learning")
    home = tmp_path / "learned"
    with LLM(str(model), **OPTIONS | {"proposer": "off"}) as plain:
        expected = [serve(plain, seed) for seed in range(16)]
    with engine(model, drafter, str(home)) as llm:
        for seed in range(16):
            assert serve(llm, seed) == expected[seed]
        assert learning(llm).tokens > 3000 and learning(llm).swaps == 0
        assert wait_for(lambda: learning(llm).swaps > 0)
        for seed in range(8):
            assert serve(llm, seed) == expected[seed]
        found = learning(llm)
        assert found.is_on and found.slices > 0 and found.trained_tokens > 0
        assert found.acceptance > found.acceptance_before + 0.1
        remote: Any = SimpleNamespace(report=report_of(llm.stats()), restarts=0, info=None)
        metrics = Metrics(remote, "model").text().decode()
        assert re.search(r"headrace_draft_learning_tokens_total{.*} [1-9]", metrics)
        assert re.search(r"headrace_draft_swaps_total{.*} [1-9]", metrics)
        assert llm.stats().proposer_failures == 0
    assert "new draft weights 1 after" in caplog.text and "draft weights kept" in caplog.text
    assert sorted(path.name for path in home.iterdir()) == [
        "config.json",
        "learned.json",
        "model.safetensors",
    ]
    with engine(model, drafter, str(home)) as llm:
        assert serve(llm, 3) == expected[3]
        assert learning(llm).acceptance > found.acceptance_before + 0.1
    with engine(model, home, "") as llm:  # the folder is a drafter like any other
        assert serve(llm, 3) == expected[3]
        assert llm.stats().accepted > 20 and learning(llm) == LearningStats()


def test_worse_weights_are_rolled_back(
    model: Path, drafter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.learning")
    good = trained(model, drafter, tmp_path / "good")
    with engine(model, good, str(tmp_path / "home")) as llm:
        learner = llm._engine.learner
        assert learner
        expected = [serve(llm, seed) for seed in range(4)]
        before = learning(llm).acceptance
        assert before > 0.2
        wrong = tmp_path / "wrong"
        wrong.mkdir()
        for path in drafter.iterdir():
            (wrong / path.name).write_bytes(path.read_bytes())
        learner._take({"folder": str(wrong), "figures": "none"})
        assert wait_for(lambda: learning(llm).swaps == 1)
        assert [serve(llm, seed) for seed in range(4)] == expected
        assert learning(llm).rollbacks == 1
        assert [serve(llm, seed) for seed in range(4)] == expected
        assert learning(llm).acceptance > before - 0.05
    assert "draft weights rolled back" in caplog.text
    assert not (tmp_path / "home" / "model.safetensors").exists()


def test_salted_requests_stay_out_of_the_buffer(model: Path, drafter: Path) -> None:
    for learns, salt in ((False, "tenant"), (True, "tenant"), (False, None)):
        with engine(model, drafter, learn_salted=learns) as llm:
            serve(llm, 1, cache_salt=salt)
            assert (learning(llm).tokens > 100) == (learns or salt is None)


def test_the_end_of_the_trainer_harms_nothing(
    model: Path, drafter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(model, drafter) as llm:
        expected = serve(llm, 1)
        assert serve(llm, 1) == expected
        learner = llm._engine.learner
        assert learner and learner.trainer_pid
        os.kill(learner.trainer_pid, signal.SIGKILL)
        assert wait_for(lambda: not learning(llm).is_on)
        assert serve(llm, 1) == expected and llm.stats().drafted > 0
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [each for each in warnings if "drafts learn" in each] == [
        "drafts learn no more, and all else goes on: the trainer ended with status -9"
    ]


TOO_SMALL = (
    "import resource; resource.setrlimit(resource.RLIMIT_AS, (300 << 20,) * 2); " + IN_FOREGROUND
)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import time; time.sleep(600)", "the trainer was silent for 1 s"),
        ("raise SystemExit(3)", "the trainer ended with status 3"),
        (TOO_SMALL, "(Error|the trainer ended with status)"),
    ],
    ids=["hangs", "exits", "lacks memory"],
)
def test_a_trainer_that_fails_harms_nothing(
    model: Path,
    drafter: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    reason: str,
) -> None:
    monkeypatch.setattr(trainer_process, "COMMAND", (sys.executable, "-P", "-c", script))
    if "sleep" in script:
        monkeypatch.setattr(learner_module, "_SILENCE", 1.0)
    with engine(model, drafter) as llm:
        expected = serve(llm, 1)
        assert serve(llm, 1) == expected
        assert wait_for(lambda: not learning(llm).is_on)
        assert serve(llm, 1) == expected and llm.stats().proposer_failures == 0
    warnings = [each.getMessage() for each in caplog.records if each.name == "headrace.learning"]
    assert len(warnings) == 1
    assert re.search(f"drafts learn no more, and all else goes on: .*{reason}", warnings[0])


def test_the_trainer_ends_with_the_engine(model: Path, drafter: Path) -> None:
    llm = engine(model, drafter)
    assert serve(llm, 1) == serve(llm, 1)
    learner = llm._engine.learner
    assert learner and learner.trainer_pid
    pid = learner.trainer_pid
    scratch = Path(learner._parts.setup["out"])
    llm.close()
    assert not Path(f"/proc/{pid}").exists() and not scratch.exists()


def test_new_weights_free_the_memory_of_the_earlier_ones(model: Path, drafter: Path) -> None:
    """They are weights, KV and buffers, about 1 MB."""
    with engine(model, drafter) as llm:
        expected = serve(llm, 1)
        learner = llm._engine.learner
        assert learner
        parts = learner._parts
        sizes = []
        for number in range(150):
            llm._thread.call(lambda: parts.install(parts.open(drafter)))
            if number % 25 == 0:
                assert serve(llm, 1) == expected
                gc.collect()
                sizes.append(private_mb())
        assert sizes[-1] - sizes[1] < 15
        assert llm.stats().proposer_failures == 0


def private_mb() -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) / 1000


def test_broken_weights_end_the_learning(
    model: Path, drafter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(model, drafter) as llm:
        expected = serve(llm, 1)
        learner = llm._engine.learner
        assert learner
        (tmp_path / "broken").mkdir()
        with pytest.raises(Exception, match=r"config\.json"):
            learner._take({"folder": str(tmp_path / "broken"), "figures": ""})
        learner._take({"error": "MemoryError: too large"})
        assert not learning(llm).is_on and serve(llm, 1) == expected
    assert "all else goes on: MemoryError: too large" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_model": ""}, "learn_drafts trains the drafter that draft_model names"),
        ({"learn_drafts_bytes": 1000}, "learn_drafts_bytes is 1,000, but 16 texts of 128 tokens"),
        ({"backend": "cuda"}, "learn_drafts is for the backend cpu, and backend is cuda"),
        ({"learn_drafts": 5}, "learn_drafts must be text, not 5"),
        ({"learn_salted": 1}, "learn_salted must be true or false, not 1"),
        ({"tensor_parallel_size": 2}, "learn_drafts is for one rank"),
    ],
)
def test_learning_refuses_options(
    model: Path, drafter: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        engine(model, drafter, **options)


def test_learning_refuses_other_drafters(model: Path, tmp_path: Path) -> None:
    target = open_checkpoint(model)
    pair = target.spec, dict(target.tensors)
    eagle1 = write_eagle1(tmp_path / "eagle1", random_eagle1(pair), "authors")
    with pytest.raises(RequestError, match="is a drafter of the kind EAGLE-1"):
        engine(model, eagle1)
    with pytest.raises(RequestError, match="is no drafter"):
        engine(model, model)
    made = random_drafter(pair)
    norms = {f"midlayer.self_attn.{part}_norm.weight": np.ones(16, np.float32) for part in "qk"}
    qwen3 = write_folder(
        tmp_path / "qwen3",
        made,
        "authors",
        {name: torch.from_numpy(value) for name, value in norms.items()},
        model_type="qwen3",
        head_dim=16,
    )
    with pytest.raises(UnsupportedModelError, match="which learn_drafts does not train"):
        engine(model, qwen3)


def test_learning_refuses_other_folders(model: Path, drafter: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is the folder of draft_model"):
        engine(model, drafter, str(drafter))
    with pytest.raises(RequestError, match="cannot be made"):
        engine(model, drafter, str(tmp_path / "none" / "learned"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "text").write_text("")
    with pytest.raises(RequestError, match=r"has files, but no learned\.json"):
        engine(model, drafter, str(tmp_path / "other"))
    home = tmp_path / "home"
    KeptWeights(home, drafter, {"model": "another", "drafter": "this"}).keep(drafter)
    with pytest.raises(RequestError, match="were learned with another model"):
        engine(model, drafter, str(home))


def test_learning_needs_torch(model: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn_drafts, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'headrace\[train\]'"):
        engine(model, drafter)


def test_the_engine_never_imports_torch(model: Path, drafter: Path) -> None:
    """In a process of its own: the tests have torch."""
    import subprocess

    script = (
        "import sys; from headrace import LLM\n"
        f"with LLM({str(model)!r}, **{OPTIONS!r}, draft_model={str(drafter)!r}, "
        "learn_drafts='on') as llm: llm.generate('hello')\n"
        "assert llm._engine.learner and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
