"""Profiles of experts, and the picture of the rows of each expert."""

from xml.etree import ElementTree

import numpy as np
import pytest

from headrace.backend import lower_program
from headrace.measure.expert_picture import expert_map_svg
from headrace.measure.experts import expert_profile
from headrace.measure.op_profile import decode_phase, prefill_phase
from tests.moe import MoeModel

SVG = "{http://www.w3.org/2000/svg}"
PROGRAM, TENSORS = MoeModel(experts=4, top_k=2, layers=2).program()


def cells(svg: str) -> list[tuple[str, str]]:
    """Colour and words of each."""
    found = [
        cell
        for cell in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if cell.get("class") == "expert"
    ]
    return [(cell.attrib["fill"], cell[0].text or "") for cell in found]


def test_measured_and_expected_experts() -> None:
    program = lower_program("cpu", PROGRAM, TENSORS)
    steps = [np.array([[5, 0, 0, 5], [4, 3, 2, 1]]), np.array([[1, 1, 0, 0], [0, 0, 0, 2]])]
    found = expert_profile(prefill_phase(513, 2), program, steps)
    assert (found.phase, found.num_experts) == ("prefill 513", 4)
    assert found.measured == pytest.approx((2 + 4 + 2 + 1) / 4)
    assert found.expected == pytest.approx((4 + 2) / 2)  # 512 rows go to all four, and one to two
    assert found.loads.tolist() == [[6, 1, 0, 5], [4, 3, 2, 3]]
    assert (found.mean_load, found.max_load, found.min_load) == (3.0, 2.0, 0.0)


def test_expected_experts_of_one_step() -> None:
    found = expert_profile(decode_phase(9, 3, 2), PROGRAM, [np.full((2, 4), 3)])
    assert (
        found.expected == pytest.approx(4 * (1 - 0.5**3))
        and found.max_load == found.min_load == 1.0
    )


def test_expert_picture_has_a_cell_for_each_expert() -> None:
    svg = expert_map_svg("A & B", [[8, 4, 2], [1, 0, 9]])
    found = cells(svg)
    assert [words for _, words in found[:2]] == [
        "layer 0, expert 0: 8 rows, 2.00 times the mean",
        "layer 0, expert 1: 4 rows, 1.00 times the mean",
    ]
    assert len(found) == 6 and found[1][0] == "#f7f7f7"
    assert "A &amp; B" in svg and "2 layers of 3 experts, 4.0 rows each" in svg
    assert "the busiest had 2.2 times the mean, the least busy 0.00; 1 had none" in svg


def test_expert_picture_colours_end_at_four_times_the_mean() -> None:
    """The same share has the same colour in every picture."""
    loads = [[400, 100, 800] + [100] * 5, [25, 0, 50] + [25] * 5]
    even = sum(map(sum, loads)) / 16
    colours = [colour for colour, _ in cells(expert_map_svg("t", loads))]
    red, blue = (lambda colour: int(colour[1:3], 16)), (lambda colour: int(colour[5:7], 16))
    assert even == 125
    assert red(colours[0]) > blue(colours[0]) and red(colours[1]) < blue(colours[1])
    assert colours[2] == "#d55e00" and colours[8] == colours[9] == "#0072b2"
    (middle, _), (double, _) = cells(expert_map_svg("t", [[1, 2, 0]]))[:2]
    assert (middle, double) == ("#f7f7f7", cells(expert_map_svg("t", [[50, 100, 0]]))[1][0])


@pytest.mark.parametrize(("layers", "experts"), [(1, 1), (1, 4), (26, 256), (60, 8)])
def test_expert_picture_stays_on_the_page(layers: int, experts: int) -> None:
    root = ElementTree.fromstring(expert_map_svg("t", [[3] * experts] * layers))
    height = float(root.attrib["height"])
    for rect in root.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert (
            x + float(rect.attrib["width"]) <= 1000 and y + float(rect.attrib["height"]) <= height
        )
    for words in root.iter(f"{SVG}text"):
        assert 0 <= float(words.attrib["y"]) <= height and "had none" not in (words.text or "")
