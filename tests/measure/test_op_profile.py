"""Op profiles and the roofline picture: on ops of known cost, and on a tiny model that runs."""

import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headrace.backend import lower_program
from headrace.batch import StepTimes
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.measure.op_profile import (
    OpProfile,
    PhaseProfile,
    account_phase,
    decode_phase,
    median_machine,
    phases,
    prefill_phase,
)
from headrace.measure.phase_timer import PhaseTimer, num_blocks
from headrace.measure.roofline_picture import roofline_svg
from headrace.model import trace_model
from headrace.planner import roofline
from headrace.planner.hardware import Machine
from headrace.program.op import Op, StepSize
from headrace.program.trace import Program
from tests.tiny import tiny_model

HERE = Machine("Zen 4", "avx512", 2, 36e9, {"int8": 940e9, "bf16": 470e9, "f32": 235e9})
SPEC, TENSORS = tiny_model(3, layers=3, dim=64, ffn=96, format="Q8_0", context=2048)
PROGRAM = lower_program("cpu", trace_model(SPEC, TENSORS), TENSORS)
SVG = "{http://www.w3.org/2000/svg}"


def times(program: Program, seconds: float, **others: float) -> StepTimes:
    """Every kind of op takes so long, and the step a tenth more than all of them."""
    ops = {op.name: seconds for op in program.ops} | others
    return StepTimes(1.1 * sum(ops.values()), ops, 7)


def op_profile(**fields: float) -> OpProfile:
    plain = OpProfile(
        name="linear",
        calls=1,
        seconds=1.0,
        bytes=36_000_000,
        flops=1000,
        kind="int8",
        memory_seconds=0.001,
        arithmetic_seconds=1e-9,
        floor=0.001,
    )
    return replace(plain, **fields)


class TestPhases:
    def test_depths_with_the_first_batch_and_batches_at_the_first_depth(self) -> None:
        found = phases((512, 512), (128, 2048), (1, 4), 2)
        names = [
            "prefill 512",
            "decode, depth 128, batch 1",
            "decode, depth 2,048, batch 1",
            "decode, depth 128, batch 4",
        ]
        assert [phase.name for phase in found] == names
        assert [phase.length for phase in found] == [512, 129, 2049, 129]

    def test_without_depths_or_batches_there_is_no_decode(self) -> None:
        assert phases((), (), (1, 4), 2) == phases((), (128,), (), 2) == []

    def test_a_prefill_is_cut_as_the_limit_is(self) -> None:
        phase = prefill_phase(1030, 2)
        assert list(phase.steps) == [
            StepSize((chunk,), 1, 2) for chunk in ((0, 512), (512, 512), (1024, 6))
        ]
        measured = account_phase(phase, PROGRAM, HERE, [[times(PROGRAM, 1.0)] * 3])
        assert measured.limit == pytest.approx(roofline.prefill_limit(PROGRAM, HERE, 1030, 2))

    def test_the_limit_of_decode_is_that_of_the_planner(self) -> None:
        measured = account_phase(decode_phase(100, 4, 2), PROGRAM, HERE, [[times(PROGRAM, 1.0)]])
        assert measured.limit == pytest.approx(roofline.decode_limit(PROGRAM, HERE, 100, 2, seqs=4))


class TestAccount:
    def test_bytes_and_operations_are_those_of_the_ops(self) -> None:
        phase = prefill_phase(700, 2)
        measured = account_phase(phase, PROGRAM, HERE, [[times(PROGRAM, 1.0)] * 2])
        assert {op.name for op in measured.ops} == {op.name for op in PROGRAM.ops}
        for op in measured.ops:
            calls = [
                (own, size) for own in PROGRAM.ops if own.name == op.name for size in phase.steps
            ]
            assert (op.calls, op.bytes) == (len(calls), sum(own.bytes(size) for own, size in calls))
            assert op.flops == sum(own.flops(size) for own, size in calls)
            assert op.floor == pytest.approx(
                sum(roofline.op_seconds(own, size, HERE) for own, size in calls)
            )
            assert op.memory_seconds == op.bytes / HERE.bandwidth
            kinds = {roofline.op_kind(own, size) for own, size in calls}
            if len(kinds) == 1:
                assert {op.kind} == kinds
                assert op.arithmetic_seconds == op.flops / HERE.rates[op.kind]

    def test_the_format_of_an_op_is_that_of_most_of_its_multiply_adds(self) -> None:
        spec, tensors = tiny_model(3, layers=3, dim=64, ffn=96, format="F32", context=2048)
        exact = lower_program("cpu", trace_model(spec, tensors), tensors)
        for most, fewest, kind in ((exact, PROGRAM, "f32"), (PROGRAM, exact, "int8")):
            program = replace(
                most, ops=[*most.ops, next(op for op in fewest.ops if op.name == "linear")]
            )
            measured = account_phase(decode_phase(8, 1, 2), program, HERE, [[times(program, 1.0)]])
            assert [op.kind for op in measured.ops if op.name == "linear"] == [kind]

    def test_every_figure_is_a_median_and_a_phase_the_sum_of_its_steps(self) -> None:
        rounds = [[times(PROGRAM, seconds)] * 2 for seconds in (1.0, 2.0, 9.0)]
        measured = account_phase(prefill_phase(700, 2), PROGRAM, HERE, rounds)
        assert all(op.seconds == 4.0 for op in measured.ops)
        assert (
            measured.wall
            == pytest.approx(1.1 * 4.0 * len(measured.ops))
            == pytest.approx(measured.seconds)
        )
        assert measured.outside == pytest.approx(0.1 * 4.0 * len(measured.ops))
        assert measured.barriers == 14 and len(measured.walls) == 3

    def test_an_op_that_the_program_does_not_name_has_time_and_no_cost(self) -> None:
        measured = account_phase(
            decode_phase(8, 1, 2), PROGRAM, HERE, [[times(PROGRAM, 1.0, mystery=5.0)]]
        )
        (mystery,) = [op for op in measured.ops if op.name == "mystery"]
        assert (mystery.calls, mystery.seconds, mystery.bytes, mystery.flops, mystery.floor) == (
            0,
            5.0,
            0,
            0,
            0.0,
        )
        assert mystery.bound == "unknown"

    def test_an_op_without_a_time_of_its_own_keeps_its_cost(self) -> None:
        step = times(PROGRAM, 1.0)
        del step.ops["norm"], step.ops["gather_rows"]
        measured = account_phase(decode_phase(8, 1, 2), PROGRAM, HERE, [[step]])
        (norm,) = [op for op in measured.ops if op.name == "norm"]
        assert (
            norm.seconds == 0
            and norm.bytes > 0
            and norm.memory_share == 0
            and norm.bound == "unknown"
        )
        assert "gather_rows" not in {op.name for op in measured.ops}  # neither time nor cost
        size = measured.phase.steps[0]
        assert sum(op.bytes for op in measured.ops) == sum(op.bytes(size) for op in PROGRAM.ops)

    @pytest.mark.parametrize(
        ("fields", "bound"),
        [
            ({"seconds": 0.001}, "memory"),
            ({"seconds": 0.0021}, "neither"),
            ({"seconds": 0.0021, "calls": 1000}, "latency"),
            ({"seconds": 0.0019, "calls": 1000}, "memory"),
            ({"seconds": 0.003, "arithmetic_seconds": 0.002}, "arithmetic"),
            ({"seconds": 0.0}, "unknown"),
        ],
    )
    def test_bound(self, fields: dict[str, float], bound: str) -> None:
        assert op_profile(**fields).bound == bound

    def test_shares_of_what_was_measured(self) -> None:
        op = op_profile(seconds=0.004, arithmetic_seconds=0.001)
        assert (op.memory_share, op.arithmetic_share) == (0.25, 0.25)

    def test_the_machine_is_the_median_of_its_measurements(self) -> None:
        slower = Machine("Zen 4", "avx512", 2, 20e9, {"int8": 950e9, "bf16": 470e9, "f32": 200e9})
        other = Machine("Zen 4", "avx512", 2, 10e9, {"int8": 960e9, "bf16": 470e9, "f32": 235e9})
        assert median_machine([HERE, slower, other]) == replace(
            slower, rates=dict(slower.rates) | {"f32": 235e9}
        )


@pytest.mark.parametrize("kv_dtype", ["bf16", "f32"])
def test_a_model_that_runs(kv_dtype: str) -> None:
    """Prefill over several chunks and batches of all sizes, on the cpu backend."""
    asked = phases((100, 600), (0, 5, 600), (1, 3), 2 if kv_dtype == "bf16" else 4)
    checkpoint = Checkpoint(Path("tiny"), SPEC, TENSORS, None, Path("tiny"))
    timer = PhaseTimer(
        "tiny",
        checkpoint,
        EngineConfig(backend="cpu", threads=2, kv_dtype=kv_dtype),
        max(num_blocks(phase, 32) for phase in asked),
    )
    try:
        for phase in asked:
            rounds = timer.time_phase(phase)
            assert all(len(steps) == len(phase.steps) for steps in rounds)
            assert all(sum(step.ops.values()) <= step.wall for steps in rounds for step in steps)
            measured = account_phase(phase, timer.executable.program, HERE, rounds)
            assert min(measured.walls) <= measured.wall <= max(measured.walls)
            assert measured.seconds == pytest.approx(
                sum(op.seconds for op in measured.ops) + measured.outside
            )
            own = [(op, size) for op in PROGRAM.ops for size in phase.steps]
            assert sum(op.bytes for op in measured.ops) == sum(op.bytes(size) for op, size in own)
            assert sum(op.flops for op in measured.ops) == sum(op.flops(size) for op, size in own)
    finally:
        timer.close()


class TestOpNames:
    def test_in_snake_case_and_unique(self) -> None:
        names = [kind.__new__(kind).name for kind in Op.__subclasses__()]
        assert {"norm", "linear_add", "qkv_rope_write", "rope_angles"} <= set(names)
        assert len(names) == len(set(names))


class TestRooflinePicture:
    def draw(self, profiles: list[PhaseProfile], title: str = "tiny") -> ElementTree.Element:
        return ElementTree.fromstring(roofline_svg(title, HERE, profiles))

    def points(self, root: ElementTree.Element) -> list[str]:
        """`op, phase: ...` of each point."""
        return [
            group.findtext(f"{SVG}title")
            for group in root.iter(f"{SVG}g")
            if group.get("class") == "point"
        ]

    def test_a_point_for_each_op_and_phase(self) -> None:
        profiles = [
            account_phase(p, PROGRAM, HERE, [[times(PROGRAM, 1e-4)]])
            for p in phases((64,), (8, 600), (1, 4, 16), 2)
        ]
        points = [point.partition(":")[0] for point in self.points(self.draw(profiles))]
        ops = {"qkv_rope_write", "attention", "linear_add", "glu_linear", "linear"}
        assert {f"{op}, {p.phase.name}" for op in ops for p in profiles} <= set(points)
        assert len(points) == len(set(points))

    def test_the_picture_has_its_own_background(self) -> None:
        rect = self.draw(
            [account_phase(decode_phase(8, 1, 2), PROGRAM, HERE, [[times(PROGRAM, 1.0)]])]
        ).find(f"{SVG}rect")
        assert rect.get("fill") == "#ffffff" and rect.get("width") == "1000"

    def test_ceilings_only_of_the_kinds_that_are_used(self) -> None:
        phase = decode_phase(8, 1, 2)
        ops = account_phase(phase, PROGRAM, HERE, [[times(PROGRAM, 1.0)]]).ops
        for names, used in (({"linear"}, {"int8"}), ({"linear", "attention"}, {"int8", "bf16"})):
            drawn = PhaseProfile(
                phase=phase,
                ops=tuple(op for op in ops if op.name in names),
                walls=(1.0,),
                outside=0.0,
                barriers=0,
            )
            texts = [text.text for text in self.draw([drawn]).iter(f"{SVG}text")]
            assert {
                kind for kind in HERE.rates if any(text.startswith(f"{kind} ") for text in texts)
            } == used

    def test_an_op_at_its_limit_lies_on_the_roof(self) -> None:
        for intensity in (0.5, 4.0, 26.1, 90.0, 3000.0):
            num_bytes, flops = 10**9, int(intensity * 10**9)
            seconds = max(num_bytes / HERE.bandwidth, flops / HERE.rates["int8"])
            op = OpProfile(
                name="linear",
                calls=1,
                seconds=seconds,
                bytes=num_bytes,
                flops=flops,
                kind="int8",
                memory_seconds=num_bytes / HERE.bandwidth,
                arithmetic_seconds=flops / HERE.rates["int8"],
                floor=seconds,
            )
            profile = PhaseProfile(
                phase=decode_phase(8, 1, 2), ops=(op,), walls=(seconds,), outside=0.0, barriers=0
            )
            root = self.draw([profile])
            (circle,) = [
                group.find(f"{SVG}circle")
                for group in root.iter(f"{SVG}g")
                if group.get("class") == "point"
            ]
            roof = [line for line in root.iter(f"{SVG}polyline") if line.get("stroke-width") == "2"]
            at = float(circle.get("cx")), float(circle.get("cy"))
            assert min(distance(at, corners(line)) for line in roof) < 0.3

    def test_ops_without_a_roof_are_named_below(self) -> None:
        step = times(PROGRAM, 1.0, mystery=5.0)
        root = self.draw([account_phase(decode_phase(8, 1, 2), PROGRAM, HERE, [[step]])])
        assert not any("mystery" in point for point in self.points(root))
        (note,) = [
            text.text for text in root.iter(f"{SVG}text") if text.text.startswith("Not drawn")
        ]
        assert "mystery (up to" in note

    def test_a_hostile_name_stays_text(self) -> None:
        profiles = [account_phase(decode_phase(8, 1, 2), PROGRAM, HERE, [[times(PROGRAM, 1.0)]])]
        root = self.draw(profiles, 'a</text><script>&"\x00\x1b[2J')
        assert not list(root.iter(f"{SVG}script"))
        assert any(
            text.text == 'a</text><script>&"\ufffd\ufffd[2J' for text in root.iter(f"{SVG}text")
        )

    def test_nothing_to_draw_is_still_a_picture(self) -> None:
        step = StepTimes(1.0, {"mystery": 1.0}, 0)
        assert not self.points(
            self.draw([account_phase(decode_phase(8, 1, 2), PROGRAM, HERE, [[step]])])
        )

    def test_more_phases_and_ops_than_shapes_and_colours(self) -> None:
        many = phases((16, 32), tuple(range(1, 9)), tuple(range(1, 9)), 2)
        root = self.draw([account_phase(p, PROGRAM, HERE, [[times(PROGRAM, 1e-4)]]) for p in many])
        assert len({point.partition(":")[0] for point in self.points(root)}) >= 5 * len(many)


def corners(line: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in line.get("points").split())
    return [(float(x), float(y)) for x, y in pairs]


def distance(point: tuple[float, float], line: list[tuple[float, float]]) -> float:
    """From a point to a line of two ends."""
    (x0, y0), (x1, y1) = line
    length = math.dist(*line)
    along = ((point[0] - x0) * (x1 - x0) + (point[1] - y0) * (y1 - y0)) / length**2
    along = min(1.0, max(0.0, along))
    return math.dist(point, (x0 + along * (x1 - x0), y0 + along * (y1 - y0)))
