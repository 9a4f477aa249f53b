"""Written folders hold the quantised matrices exactly, next to the model's other files."""

import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint.load import open_checkpoint
from headrace.convert.destination import check_destination
from headrace.convert.embedding_types import parsed_types
from headrace.convert.folder.config import config_json
from headrace.convert.folder.matrix_writer import pack_bits
from headrace.convert.folder.writer import matrix_writer, plan_folder, write_folder
from headrace.convert.matrices import quantisable, round_matrix
from headrace.convert.source_model import SourceModel, open_source_model
from headrace.errors import HeadraceError, RequestError, UnsupportedModelError
from headrace.model import FAMILIES
from headrace.model.fields import JsonFields
from headrace.quant.format_names import named_format
from headrace.quant.formats import StoredTensor
from tests.checkpoint.conftest import write_tiny_gguf
from tests.convert.conversion import quantise
from tests.families import save_model
from tests.llama_cpp import fixtures

FORMATS = [
    "int2-g32",
    "int3-g32",
    "int4-g32",
    "int8-g32",
    "int3-row",
    "int8-row",
    "int4-g16",
    "int2-g32-asym",
    "int3-g32-asym",
    "int4-row-asym",
    "int8-g32-asym",
    "w8a8",
    "llm-int8",
    "e4m3-row",
    "e4m3-g32",
]
OTHERS = {
    "tokenizer.json": "{}",
    "notes.md": "kept",
    "model.safetensors.index.json": "{}",
    "old.bin": "weights",
    ".hidden": "no",
}


def written(
    folder: Path, name: str, out: Path, embeddings: dict[str, str] | None = None
) -> tuple[SourceModel, dict[str, StoredTensor]]:
    """Convert a folder by rounding to nearest; returns the source model and the rounded
    matrices by our names.
    """
    original, packing = open_source_model(folder), matrix_writer(named_format(name))
    tensors, types = original.checkpoint.tensors, parsed_types(embeddings or {})
    names = quantisable(original.checkpoint.spec, tensors)
    plan = plan_folder(original, packing, names, embeddings=types)
    made = quantise("rtn", original.checkpoint.spec, tensors, plan.names, named_format(name))
    results = {ours: made[ours] for ours in reversed(plan.names)} | {
        ours: round_matrix(tensors[ours], to) for ours, to in plan.embeddings.items()
    }
    write_folder(original, out, plan, tensors, results.items())
    return original, results


def check_same(original: SourceModel, made: dict[str, StoredTensor], out: Path) -> None:
    found = open_checkpoint(out)
    assert (
        found.spec == original.checkpoint.spec or found.spec.name != original.checkpoint.spec.name
    )
    assert found.tensors.keys() == original.checkpoint.tensors.keys()
    for name, tensor in found.tensors.items():
        want = made.get(name, original.checkpoint.tensors[name])
        np.testing.assert_array_equal(tensor.dequantise(), want.dequantise(), err_msg=name)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama3-gqa", folder)
    for name, text in OTHERS.items():
        (folder / name).write_text(text)
    (folder / "model.safetensors.index.json").unlink()
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_matrices_are_read_again(llama: Path, name: str, tmp_path: Path) -> None:
    original, made = written(llama, name, tmp_path / "out")
    assert len(made) == 7 * 3
    check_same(original, made, tmp_path / "out")


@pytest.mark.parametrize(
    "variant",
    ["phi3", "qwen3-moe", "gemma2", "gpt-neox", "falcon-40b", "deepseek-v3", "smollm2", "gpt2"],
)
def test_folders_of_all_families(variant: str, tmp_path: Path) -> None:
    """Fused, stacked, transposed and reordered matrices are written as the family's
    files have them.
    """
    save_model(variant, tmp_path / "model")
    original, made = written(tmp_path / "model", "int4-row", tmp_path / "out")
    assert bool(made) == (variant != "gpt2")
    check_same(original, made, tmp_path / "out")


@pytest.mark.parametrize("name", ["nf4-g32", "fp4-g16"])
def test_nested_scales(llama: Path, name: str, tmp_path: Path) -> None:
    _, made = written(llama, name, tmp_path / "out")
    found = open_checkpoint(tmp_path / "out").tensors
    for ours, want in made.items():
        read, spec = found[ours].format.table_rows, want.format.spec
        assert read and spec
        table = read(
            found[ours].parts,
            slice(None) if found[ours].row_order is None else found[ours].row_order,
        )
        np.testing.assert_array_equal(table.codes, want.parts["codes"])
        # A value of the upper decade is at most 0.9 / 64 from its neighbours, and those of the
        # lowest are finer than 1e-6.
        scales = want.parts["scales"]
        largest = np.abs(scales - scales.mean()).max()
        np.testing.assert_allclose(table.scales, scales, rtol=0, atol=1.5 * largest * 0.9 / 64)


def test_other_files_are_copied(llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama, tmp_path / "source")
    for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
        (source / name).write_text("{}")  # of a quantisation that the new folder does not have
    written(source, "int4-g32", tmp_path / "out")
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "notes.md",
    }
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.pop("quantization_config")["ignore"] == ["lm_head", "model.embed_tokens"]
    assert config == json.loads((llama / "config.json").read_text())


@pytest.mark.parametrize(
    ("dtype", "name"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")]
)
def test_plain_dtypes(llama: Path, dtype: str, name: str, tmp_path: Path) -> None:
    original = open_source_model(llama)
    write_folder(
        original,
        tmp_path / "out",
        plan_folder(original, None, (), dtype),
        original.checkpoint.tensors,
        (),
    )
    for ours, tensor in open_checkpoint(tmp_path / "out").tensors.items():
        assert tensor.format.name == dtype
        values, want = tensor.dequantise(), original.checkpoint.tensors[ours].dequantise()
        assert (np.abs(values - want) <= np.abs(want) * 2.0**-8 + 2.0**-24).all()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == name


def test_models_that_no_config_json_describes(tmp_path: Path) -> None:
    """A GGUF file stores rotary factors as a tensor, not the rule that made them."""
    original = open_source_model(fixtures.unpack("llama3-gqa", tmp_path))
    assert original.checkpoint.spec.rope and original.checkpoint.spec.rope.factors
    with pytest.raises(UnsupportedModelError, match=r"rope would be .* convert it to GGUF"):
        plan_folder(original, None, (), "BF16")


@pytest.mark.parametrize(
    "keys",
    [
        {"type": "linear", "factor": 4.0},
        {"type": "yarn", "factor": 4.0, "original_context_length": 256, "attn_factor": 0.9},
    ],
)
def test_rotary_rules_that_config_json_describes(keys: dict[str, Any], tmp_path: Path) -> None:
    change = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    spec = open_checkpoint(write_tiny_gguf(tmp_path / "a.gguf", change)).spec
    made = FAMILIES["llama"].config
    assert made and made.spec(JsonFields(config_json(spec), "config.json")).rope == spec.rope


def test_a_quantised_folder_is_converted_again(llama: Path, tmp_path: Path) -> None:
    written(llama, "int8-g32", tmp_path / "eight")
    original, made = written(tmp_path / "eight", "int4-g32", tmp_path / "four")
    check_same(original, made, tmp_path / "four")
    assert "pack-quantized" in (tmp_path / "four/config.json").read_text()


@pytest.mark.parametrize("name", ["int4-g96", "nf4-g128"])
def test_groups_that_do_not_divide(llama: Path, name: str, tmp_path: Path) -> None:
    with pytest.raises(
        RequestError,
        match=r"tensor model\.layers\.0\.\S+ has (64|96) columns, not a multiple of the \d+ "
        r".*choose "
        r"groups of",
    ):
        written(llama, name, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["nf4-row", "iq4_nl-g32", "e5m2-row"])
def test_formats_without_a_folder_writer(name: str) -> None:
    with pytest.raises(RequestError, match="has no format for"):
        matrix_writer(named_format(name))


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_conversion_leaves_no_files(
    llama: Path, tmp_path: Path, failure: type[BaseException]
) -> None:
    original, packing = open_source_model(llama), matrix_writer(named_format("int4-g32"))
    tensors = original.checkpoint.tensors
    plan = plan_folder(original, packing, quantisable(original.checkpoint.spec, tensors))
    made = quantise("rtn", original.checkpoint.spec, tensors, plan.names, named_format("int4-g32"))

    def some() -> Iterator[tuple[str, StoredTensor]]:
        yield from [(name, made[name]) for name in plan.names[:5]]
        assert len(list(tmp_path.iterdir())) == 1
        raise failure

    with pytest.raises(failure):
        write_folder(original, tmp_path / "out", plan, tensors, some())
    assert not list(tmp_path.iterdir())


def test_disk_errors(llama: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(HeadraceError, match="out: File too large"):
            written(llama, "int4-g32", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_destination_is_checked(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for place, message in (
        (tmp_path / "there", "exists"),
        (tmp_path / "no/such", "cannot be written"),
    ):
        with pytest.raises(RequestError, match=message):
            check_destination(place)


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack_bits(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (5, 37), np.uint8)
    words: Any = pack_bits(codes, bits).view(np.uint32)
    for row, packed in zip(codes, words, strict=True):
        number = sum(int(word) << 32 * i for i, word in enumerate(packed))
        assert [number >> bits * i & (1 << bits) - 1 for i in range(37)] == row.tolist()
