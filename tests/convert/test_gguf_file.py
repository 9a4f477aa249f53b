"""Written GGUF files: the formats of a mixture, our encoders' blocks, and all metadata."""

from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint.gguf import read_gguf
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.cli.main import main
from headrace.convert.gguf.writer import plan_gguf, write_gguf
from headrace.convert.matrices import quantisable
from headrace.convert.methods import prepare_model
from headrace.convert.source_model import open_source_model
from headrace.errors import RequestError
from headrace.quant.encode import encode
from tests.llama_cpp import fixtures
from tests.oracle.test_gguf_types import write

CHANGED = {"general.file_type", "general.quantization_version"}


def written(source: Path, mixture: str, out: Path) -> list[float]:
    """Convert a file by rounding to nearest; returns the reported progress."""
    original, told = open_source_model(source), list[float]()
    write_gguf(original, out, plan_gguf(original, mixture), {}, told.append)
    return told


@pytest.mark.parametrize("name", fixtures.KEPT)
def test_convert_gguf_files_of_every_architecture(name: str, tmp_path: Path) -> None:
    """Files of llama.cpp's converter: each tensor has the blocks of its rows, and the
    metadata stays.
    """
    source, out = fixtures.unpack(name, tmp_path), tmp_path / "out.gguf"
    told = written(source, "Q4_0", out)
    assert told == sorted(told) and told[-1] == pytest.approx(1)
    before, after = read_gguf(source), read_gguf(out)
    assert before.tensors.keys() == after.tensors.keys()
    for key in before.metadata.keys() - CHANGED:
        assert before.metadata.raw(key) == after.metadata.raw(key)
    assert after.metadata.integer("general.file_type") == 2
    kinds = set()
    for key, tensor in after.tensors.items():
        whole = before.tensors[key].dequantise()
        assert tensor.shape == before.tensors[key].shape
        if tensor.format.name == before.tensors[key].format.name:
            np.testing.assert_array_equal(tensor.parts["codes"], before.tensors[key].parts["codes"])
        else:
            np.testing.assert_array_equal(
                tensor.parts["codes"], encode(tensor.format.name, whole.reshape(-1, tensor.cols))
            )
        kinds.add(tensor.format.name)
    assert "Q4_0" in kinds and "F32" in kinds
    open_checkpoint(out)


def test_convert_the_default_model_to_gguf(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 8 bits it gives the same answer; its rows of 576 do not fit blocks of 256."""
    assert main(["convert", "smollm2", str(tmp_path / "eight.gguf"), "--to", "q8_0"]) == 0
    assert "144.8 MB; smollm2 has 96.6 MB" in capsys.readouterr().out
    assert (
        main(
            [
                "run",
                str(tmp_path / "eight.gguf"),
                "What is the capital of France?",
                "--max-tokens",
                "7",
            ]
        )
        == 0
    )
    assert "The capital of France is Paris" in capsys.readouterr().out


def test_importance_lowers_errors_of_columns(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "IQ4_XS")
    original = open_source_model(tmp_path / "model.gguf")
    checkpoint = original.checkpoint
    names = quantisable(checkpoint.spec, checkpoint.tensors)
    pieces = [
        np.random.default_rng(i).integers(0, checkpoint.spec.vocab_size, 30).tolist()
        for i in range(4)
    ]
    model = prepare_model(
        "imatrix", checkpoint.spec, checkpoint.tensors, names, "Q4_0", pieces, 1, lambda done: None
    )
    assert model.importance.keys() <= set(names) and len(model.importance) > 3
    errors = []
    for importance in ({}, model.importance):
        out = tmp_path / f"{len(importance)}.gguf"
        write_gguf(original, out, plan_gguf(original, "Q4_0"), importance, lambda done: None)
        tensors = open_checkpoint(out).tensors
        lost = {
            name: tensors[name].dequantise() - checkpoint.tensors[name].dequantise()
            for name in model.importance
        }
        errors.append(
            sum(
                float((np.square(rows) * model.importance[name]).sum())
                for name, rows in lost.items()
            )
        )
    assert 0 < errors[1] < 0.99 * errors[0]


def test_an_interrupted_conversion_leaves_no_file(tmp_path: Path) -> None:
    original = open_source_model(resolve("smollm2"))

    def interrupt(done: float) -> None:
        assert len(list(tmp_path.iterdir())) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_gguf(original, tmp_path / "out.gguf", plan_gguf(original, "Q8_0"), {}, interrupt)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to", "Q9"], "unknown mixture of formats"),
        (["--to", "Q4_0", "--method", "awq"], "rtn or imatrix"),
    ],
)
def test_invalid_gguf_conversions(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["convert", "smollm2", str(tmp_path / "out.gguf"), *flags]) == RequestError.exit_code
    )
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    source = fixtures.unpack(fixtures.KEPT[0], tmp_path)
    matrix = next(
        tensor
        for name, tensor in read_gguf(source).tensors.items()
        if name.endswith("ffn_down.weight")
    )
    data = bytearray(source.read_bytes())
    at = bytes(data).index(matrix.parts["codes"].tobytes())
    data[at : at + 4] = np.float32(np.nan).tobytes()
    source.write_bytes(data)
    with pytest.raises(RequestError, match=rf"tensor {matrix.name}: .*not finite"):
        written(source, "Q4_0", tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
