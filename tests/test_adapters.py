"""LoRA adapters of `LLM` and of `headrace run`, with the default model."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace import LLM, SamplingParams
from headrace.cli.main import main
from headrace.errors import ModelNotFoundError, RequestError

PROMPT = "A water wheel turns because"
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0)


def write_adapter(
    folder: Path, rank: int, layers: Sequence[int] = (3, 20), heads: int = 576, dim: int = 576
) -> Path:
    """Write a random adapter of the queries and outputs of some layers, by default for
    SmolLM2-135M.

    It is strong enough to change the text. `heads` is the number of columns of all heads.
    """
    rng, shapes = np.random.default_rng(rank), {"q": (heads, dim), "o": (dim, heads)}
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{part}_proj.lora_{half}.weight": rng.standard_normal(  # noqa: E501
            shape, np.float32
        )
        for layer in layers
        for part, (rows, cols) in shapes.items()
        for half, shape in (("A", (rank, cols)), ("B", (rows, rank)))
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 0.5})
    )
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        f"rank {rank}": write_adapter(tmp_path_factory.mktemp("adapters") / str(rank), rank)
        for rank in (4, 16)
    }


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> Iterator[LLM]:
    with LLM("smollm2", max_model_len=128) as llm:
        for name, folder in folders.items():
            llm.load_adapter(name, folder)
        yield llm


def test_adapter_per_prompt_or_for_all(llm: LLM, folders: dict[str, Path]) -> None:
    names = [None, *folders, None]
    together = llm.generate([PROMPT] * 4, GREEDY, adapter=names)
    for result, name in zip(together, names, strict=True):
        (by_itself,) = llm.generate(PROMPT, GREEDY, adapter=name)
        assert [(o.token_ids, o.logprobs) for o in by_itself.outputs] == [
            (o.token_ids, o.logprobs) for o in result.outputs
        ]
        assert "".join(llm.stream_text(PROMPT, GREEDY, adapter=name)) == result.outputs[0].text
    assert len({result.outputs[0].text for result in together}) == 3
    vectors = llm.embed([PROMPT] * 3, adapter=names[:3])
    assert len({vector.tobytes() for vector in vectors}) == 3
    assert llm.stats().adapters == dict.fromkeys(folders, 0)


def test_invalid_adapters_raise(llm: LLM, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="unknown adapter 'rank 5'; did you mean rank 4"):
        llm.generate(PROMPT, adapter="rank 5")
    with pytest.raises(RequestError, match="adapter has 1 values for 2 prompts"):
        llm.generate([PROMPT] * 2, adapter=["rank 4"])
    with pytest.raises(RequestError, match="adapter 'rank 4' is already loaded"):
        llm.load_adapter("rank 4", folders["rank 16"])
    with pytest.raises(RequestError, match="name of the adapter must be text that is not empty"):
        llm.load_adapter("", folders["rank 16"])
    with pytest.raises(ModelNotFoundError, match=r"no adapter_config\.json"):
        llm.load_adapter("empty", tmp_path)
    with pytest.raises(RequestError, match="unknown adapter 'empty'"):
        llm.unload_adapter("empty")


def test_lora_flag_of_headrace_run(
    llm: LLM, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--raw",
        "--temperature",
        "0",
        "--max-tokens",
        "8",
        "--presence-penalty",
        "0",
        "--max-model-len",
        "128",
    ]
    texts = []
    for lora in ([], ["--lora", f"it={folders['rank 16']}"]):
        assert main(["run", "smollm2", PROMPT, *flags, *lora]) == 0
        out, err = capsys.readouterr()
        texts.append(out.removesuffix("\n"))
        assert " out" in err
    expected = [
        llm.generate(PROMPT, GREEDY, adapter=name)[0].outputs[0].text for name in (None, "rank 16")
    ]
    assert texts == expected
    for wrong, message in (
        ("x", "--lora 'x' lacks a name or a path"),
        ("=x", "--lora '=x' lacks"),
        ("it=/nowhere", "/nowhere"),
    ):
        assert main(["run", "smollm2", PROMPT, *flags, "--lora", wrong]) in (2, 3)
        assert message in capsys.readouterr().err
