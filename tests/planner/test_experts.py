"""What is said of the experts of a phase, and the picture of how many rows went to each."""

from xml.etree import ElementTree

import numpy as np
import pytest

from headrace.backend import lower_program
from headrace.planner.expert_picture import expert_map_svg
from headrace.planner.experts import expert_profile
from headrace.planner.profile import decode_phase, prefill_phase
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


def test_measured_beside_expected() -> None:
    program = lower_program("cpu", PROGRAM, TENSORS)
    steps = [np.array([[5, 0, 0, 5], [4, 3, 2, 1]]), np.array([[1, 1, 0, 0], [0, 0, 0, 2]])]
    found = expert_profile(prefill_phase(513, 2), program, steps)
    assert (found.phase, found.num_experts) == ("prefill 513", 4)
    assert found.measured == pytest.approx((2 + 4 + 2 + 1) / 4)
    assert found.expected == pytest.approx((4 + 2) / 2)  # 512 rows go to all four, and one to two
    assert found.loads.tolist() == [[6, 1, 0, 5], [4, 3, 2, 3]]
    assert (found.even, found.most, found.least) == (3.0, 2.0, 0.0)


def test_expected_of_one_step() -> None:
    found = expert_profile(decode_phase(9, 3, 2), PROGRAM, [np.full((2, 4), 3)])
    assert found.expected == pytest.approx(4 * (1 - 0.5**3)) and found.most == found.least == 1.0


def test_a_cell_for_each_expert() -> None:
    svg = expert_map_svg("A & B", [[8, 4, 2], [1, 0, 9]])
    found = cells(svg)
    assert [words for _, words in found[:2]] == [
        "layer 0, expert 0: 8 rows, 2.00 times the even share",
        "layer 0, expert 1: 4 rows, 1.00 times the even share",
    ]
    assert len(found) == 6 and found[1][0] == "#f7f7f7"
    assert "A &amp; B" in svg and "2 layers of 3 experts, 4.0 rows to each" in svg
    assert "the busiest had 2.2 times as many, the least busy 0.00, and 1 had none" in svg


def test_colours_tell_more_from_fewer_and_end_at_four_times() -> None:
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
def test_everything_lies_on_the_page(layers: int, experts: int) -> None:
    root = ElementTree.fromstring(expert_map_svg("t", [[3] * experts] * layers))
    height = float(root.attrib["height"])
    for rect in root.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert (
            x + float(rect.attrib["width"]) <= 1000 and y + float(rect.attrib["height"]) <= height
        )
    for words in root.iter(f"{SVG}text"):
        assert 0 <= float(words.attrib["y"]) <= height and "had none" not in (words.text or "")
