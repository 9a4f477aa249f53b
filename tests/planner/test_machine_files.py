from copy import deepcopy

import pytest

from headrace.errors import FormatError, RequestError
from headrace.planner.machine_files import (
    FOLDER,
    machine_names,
    networks,
    parse_machine,
    read_machine,
)

RECORD = {
    "name": "Test",
    "backend": "cpu",
    "processor": "neon",
    "cores": 4,
    "sources": {"sheet": ["A datasheet", "2026-11", "https://example.org/sheet"]},
    "figures": {
        "memory": [8e9, "sheet"],
        "bandwidth": [17e9, "sheet"],
        "rate": {"f32": [1e9, "sheet"], "bf16": [1e9, "sheet"], "int8": [2e9, "sheet"]},
    },
}


@pytest.mark.parametrize("name", machine_names())
def test_each_file_has_a_source_for_each_figure(name: str) -> None:
    found = read_machine(name)
    assert found.key == name and found.sources()
    assert all(source.title and source.url for source in found.sources())
    # Fewer bits are never slower, and every device computes more than it reads.
    rates = found.machine().rates
    assert rates["f32"] <= rates["bf16"] <= rates["int8"]
    assert found.machine().ridge("bf16") > 1


def test_files_are_in_the_package() -> None:
    assert len(machine_names()) >= 15
    assert FOLDER.name == "machines"


def test_networks_have_sources() -> None:
    """100 Gbit/s are 12.5 GB/s."""
    for name, network in networks().items():
        gigabits = float(name.partition("-")[2])
        assert network.bandwidth == gigabits * 1e9 / 8 and network.seconds > 0
        assert network.source.url.startswith("https://") and network.source.title


def test_ridges_of_datasheets() -> None:
    """Operations per byte: 312 T / 2.04 T of an A100, 989 T / 3.35 T of an H100."""
    assert round(read_machine("a100-80").machine().ridge("bf16")) == 153
    assert round(read_machine("h100-sxm").machine().ridge("bf16")) == 295


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("bandwidth", 17e9, r"figure 'bandwidth' is 17000000000.0; write \[positive number"),
        ("bandwidth", [17e9], "figure 'bandwidth'"),
        ("bandwidth", [17e9, "elsewhere"], "figure 'bandwidth'"),
        ("bandwidth", [-1.0, "sheet"], "figure 'bandwidth'"),
        ("bandwidth", [float("inf"), "sheet"], "figure 'bandwidth'"),
        ("bandwidth", ["17", "sheet"], "figure 'bandwidth'"),
        ("rate", {"f32": [1e9, "sheet"]}, "lack the rate of int8, bf16"),
        ("watts", [5.0, "sheet"], "unknown figures: watts"),
    ],
)
def test_a_figure_without_a_source_is_refused(field: str, value: object, message: str) -> None:
    record = deepcopy(RECORD)
    record["figures"][field] = value  # type: ignore[index]
    with pytest.raises(FormatError, match=message):
        parse_machine("test", record)


@pytest.mark.parametrize(
    "source",
    [
        ["A datasheet", "", "https://example.org"],
        ["A datasheet", "2026", "https://example.org"],
        ["A datasheet", "2026-11", "example.org"],
        ["A datasheet", "2026-11"],
    ],
)
def test_a_source_has_title_date_and_address(source: list[str]) -> None:
    with pytest.raises(FormatError, match="machine 'test'"):
        parse_machine("test", {**RECORD, "sources": {"sheet": source}})


def test_unknown_machine() -> None:
    with pytest.raises(RequestError, match=r"'h100' is unknown; did you mean .*h100-sxm"):
        read_machine("h100")
    with pytest.raises(RequestError, match=r"known are: this, a100-40"):
        read_machine("../planner/machines/l4")
