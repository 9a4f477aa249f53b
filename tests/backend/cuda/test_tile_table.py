"""Tuned tiles: their files, which may hold anything; the tiles that kernels refuse; and the bits of
those that they take.
"""

import ast
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.backend.cuda import tile_table, tune
from headrace.backend.cuda.architecture import H100, L4
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.kernels import tiles
from headrace.backend.cuda.kernels.linear import linear
from headrace.backend.cuda.kernels.tiles import (
    ROW_BUCKETS,
    Product,
    Tile,
    bucket_of,
    obstacle_to,
    product_of,
    splits_for,
    tile_for,
    use_tiles,
)
from headrace.backend.cuda.layout import layout_of
from headrace.backend.cuda.packing import pack
from headrace.backend.cuda.tile_table import (
    SOURCES,
    TunedTile,
    load_tiles,
    read_tiles,
    tile_file,
    write_tiles,
)
from headrace.backend.cuda.tune import Linear, Tuner, candidates
from headrace.errors import CacheError
from headrace.quant.formats import FORMATS
from tests.backend.cuda.examples import examples
from tests.backend.cuda.hollow import hollow_tensor
from tests.backend.cuda.matrices import FORMAT_NAMES, random_matrix
from tests.backend.cuda.test_tiles import on

TILE = Tile(block_m=16, block_n=64, is_parallel=False, unroll=2, num_warps=4, num_stages=3)
PRODUCT = Product("int4 group 32 f16", 4096, 4096, "bfloat16")
TUNED = TunedTile(PRODUCT, 16, TILE, 9.5, 10.25)
Q4_0 = layout_of(hollow_tensor("w", "Q4_0", (256, 256)))


@pytest.fixture(autouse=True)
def no_tiles() -> Iterator[None]:
    use_tiles({})
    yield
    use_tiles({})


def test_tile_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "tiles.json"
    faster = TUNED._replace(tile=TILE._replace(num_stages=4), microseconds=8.0)
    other = TUNED._replace(product=PRODUCT._replace(rows=6144))
    assert write_tiles(file, [TUNED]) == 1
    assert write_tiles(file, [faster, other]) == 2
    assert read_tiles(file) == [faster, other]
    assert [path.name for path in file.parent.iterdir()] == ["tiles.json"]


@pytest.mark.parametrize("key", ["version", "gpu", "capability", "multiprocessors", "kernels"])
def test_tile_table_of_others_is_a_miss(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tiles.json"
    write_tiles(file, [TUNED])
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: "another"}))
    with caplog.at_level(logging.INFO, "headrace.loader"):
        assert read_tiles(file) == []
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert f"is for {key} 'another'" in caplog.text and "`headrace tune`" in caplog.text


def test_tile_table_without_a_file_is_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "headrace.loader"):
        assert read_tiles(tmp_path / "tiles.json") == []
    assert not caplog.records


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), place=st.integers(0, 3), junk=ANY_JSON, text=st.binary(max_size=40))
def test_tile_table_may_hold_anything(
    data: st.DataObject, place: int, junk: Any, text: bytes, tmp_path_factory: Any
) -> None:
    """A malformed file is one warning, whatever it holds; a well-formed file has its tiles."""
    file = tmp_path_factory.getbasetemp() / "tiles.json"
    file.unlink(missing_ok=True)
    write_tiles(file, [TUNED])
    table = json.loads(file.read_text())
    if place == 0:
        file.write_bytes(text)
    elif place == 1:
        key = data.draw(st.sampled_from(sorted(table)))
        file.write_text(json.dumps(table | {key: junk}))
    elif place == 2:
        key = data.draw(st.sampled_from(sorted(table["tiles"][0])))
        table["tiles"][0][key] = junk
        file.write_text(json.dumps(table))
    else:
        whole = file.read_bytes()
        file.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore
    logger = logging.getLogger("headrace.loader")
    logger.addHandler(handler)
    try:
        found = read_tiles(file)
    finally:
        logger.removeHandler(handler)
    use_tiles({(one.product, one.max_rows): one.tile for one in found})
    tile_for(16, 4096, 4096, Q4_0, torch.bfloat16, splits=1)
    assert len([one for one in records if one.levelname == "WARNING"]) <= 1
    assert all(isinstance(one, TunedTile) for one in found) and len(found) <= 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"\xff\xfe{", "codec can't decode"),
        (b'{"tiles": 3}', "it has no list 'tiles'"),
        (b"[" * 100_000, "recursion|RecursionError"),
        (b"7" * 5000, "digits|no list"),
    ],
)
def test_malformed_tile_table_is_one_warning(
    text: bytes, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tiles.json"
    file.write_bytes(text)
    assert read_tiles(file) == []
    (record,) = caplog.records
    assert record.levelname == "WARNING" and re.search(reason, record.message)
    assert f"{file} is no table of tiles" in record.message and "chosen by rule" in record.message


def test_tile_table_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"tiles.json: .*; change .* --out"):
        write_tiles(tmp_path / "file" / "tiles.json", [TUNED])


def test_load_tiles_lets_products_take_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rule = tile_for(9, 4096, 4096, Q4_0, torch.bfloat16, splits=1)
    write_tiles(tile_file(tmp_path), [TUNED])
    with caplog.at_level(logging.INFO, "headrace.loader"):
        load_tiles(tmp_path)
    assert f"1 tuned tiles of products are from {tmp_path}" in caplog.text
    for num_rows, expected in ((2, TILE), (16, TILE), (1, rule), (17, None)):
        tile = tile_for(num_rows, 4096, 4096, Q4_0, torch.bfloat16, splits=1)
        assert tile == expected if expected else tile != TILE
    assert tile_for(9, 4096, 4096, Q4_0, torch.float32, splits=1) != TILE
    load_tiles(tmp_path / "empty")
    assert tile_for(9, 4096, 4096, Q4_0, torch.bfloat16, splits=1) == rule


def test_row_buckets_cover_all_steps() -> None:
    assert [bucket_of(n) for n in (1, 2, 16, 17, 300, 2048, 9000)] == [
        1,
        16,
        16,
        32,
        512,
        2048,
        2048,
    ]


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (TILE, ""),
        (TILE._replace(num_stages=6), "it needs 104,448 of 97,280 bytes of shared memory"),
        (TILE._replace(block_m=24), "its sizes are 24 x 64"),
        (TILE._replace(num_stages=0), "it has 0 stages"),
        (TILE._replace(unroll=-3), "-3 tiles a round"),
        (TILE._replace(is_parallel=True), "it needs ranges of columns, and the weight has one"),
        (TILE._replace(block_n=32), "4 warps cannot multiply 32 rows of a weight"),
        (TILE._replace(num_warps=8), "8 warps cannot multiply 64 rows of a weight"),
    ],
)
def test_tuned_tile_that_cannot_run_is_refused_once(
    tile: Tile, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on(L4, monkeypatch)
    use_tiles({(PRODUCT, 16): tile})
    rule = tiles.rule_tile(16, 4096, 4096, Q4_0, torch.bfloat16, splits=1)
    chosen = [tile_for(16, 4096, 4096, Q4_0, torch.bfloat16, splits=1) for _ in range(2)]
    assert chosen == [rule if reason else tile] * 2
    assert [reason in record.message for record in caplog.records] == [True] * bool(reason)


@settings(max_examples=examples(12), deadline=None)
@given(
    name=st.sampled_from(["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "MXFP4", "e4m3"]),
    num_rows=st.integers(1, 40),
    gate=st.booleans(),
    data=st.data(),
)
def test_any_tile_has_the_same_bits(
    name: str, num_rows: int, gate: bool, data: st.DataObject
) -> None:
    blocks = 1300 // FORMATS[name].block if name in FORMATS and FORMATS[name].block > 1 else 3
    weight = pack([random_matrix(name, 42, blocks, 1)])
    splits = splits_for(42, weight.cols, weight.layout, torch.bfloat16)
    tile = Tile(
        block_m=data.draw(st.sampled_from([16, 32, 64])),
        block_n=data.draw(st.sampled_from([32, 64, 128])),
        is_parallel=splits > 1 and data.draw(st.booleans()),
        unroll=data.draw(st.sampled_from([1, 2])),
        num_warps=data.draw(st.sampled_from([4, 8])),
        num_stages=data.draw(st.integers(1, 4)),
    )
    assume(not obstacle_to(tile, weight.layout, torch.bfloat16, splits))
    torch.manual_seed(0)
    x = torch.randn(num_rows, weight.cols).to(DEVICE, torch.bfloat16)
    outputs = []
    for chosen in (None, tile):
        out = torch.full((num_rows, 21 if gate else 42), torch.nan, device=DEVICE)
        activation = "silu" if gate else ""
        linear(out, x, weight, gate=gate, activation=activation, tile=chosen)()
        outputs.append(out)
    assert torch.equal(*outputs)


def test_tuner_takes_the_fastest_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the test sets: the n-th candidate is the fastest."""
    weight = Linear(Q4_0, 48, 256, False, torch.bfloat16, torch.bfloat16, 2048)
    (rule,) = {tiles.rule_tile(1, 48, 256, Q4_0, torch.bfloat16, splits=weight.splits)}
    tried = list(dict.fromkeys([rule, *candidates(weight, rule)]))
    assert len(tried) > 2

    def tuned(seconds: list[float]) -> TunedTile:
        numbers, runs = count(), dict[int, float]()

        def clock(run: Any, rounds: int, times: int) -> list[float]:
            run()
            if id(run) not in runs:
                runs[id(run)] = seconds[next(numbers)]
            return [runs[id(run)]] * rounds

        return Tuner(weight, clock).tune(1)[1]

    slow = [3e-6] * len(tried)
    best = tuned([*slow[:2], 2e-6, *slow[3:]])
    assert best.tile == tried[2]
    assert (best.microseconds, best.microseconds_before) == (pytest.approx(1), pytest.approx(1.5))
    # Within the noise of a clock the tile of the rule stays.
    assert tuned([*slow[:2], 2.95e-6, *slow[3:]]).tile == rule


def test_candidates_fit_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "is_interpreting", lambda: False)
    for gpu in (H100, L4):
        on(gpu, monkeypatch)
        for name in ("BF16", "Q8_0", "Q4_0", "F32"):
            layout = layout_of(hollow_tensor("w", name, (256, 256)))
            weight = Linear(layout, 4096, 4096, False, torch.bfloat16, torch.bfloat16, 2048)
            for num_rows in ROW_BUCKETS:
                rule = tiles.rule_tile(
                    num_rows, 4096, 4096, layout, torch.bfloat16, splits=weight.splits
                )
                others = list(candidates(weight, rule))
                assert len(others) > 2, (name, num_rows)
                assert not any(
                    obstacle_to(tile, layout, torch.bfloat16, weight.splits) for tile in others
                )


def test_kinds_of_weights_have_names_of_their_own() -> None:
    layouts = {layout_of(hollow_tensor("w", name, (256, 256))) for name in FORMAT_NAMES}
    kinds = {replace(layout, offset=0, lookup=layout.lookup[:1] and (1.0,)) for layout in layouts}
    assert len({layout.name for layout in layouts}) >= len(kinds) > 20
    assert product_of(1, 2, Q4_0, torch.bfloat16, torch.float32).activations == (
        "float32 as bfloat16"
    )


def test_tile_table_knows_the_sources_of_a_product() -> None:
    """All modules of kernels that the product's module imports, directly or not."""
    folder = Path(tile_table.__file__).parent
    seen, left = set[str](), {"kernels/linear.py"}
    while left:
        name = left.pop()
        seen.add(name)
        for node in ast.walk(ast.parse((folder / name).read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            path = module.removeprefix("headrace.backend.cuda.").replace(".", "/") + ".py"
            if path.startswith("kernels/") and path not in seen:
                left.add(path)
    assert seen | {"layout.py"} == set(SOURCES)
