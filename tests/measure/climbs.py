"""Climbs with chosen figures."""

from dataclasses import replace
from typing import Any

from headrace.measure.climb_results import Advice, Climb, Step
from headrace.measure.climb_run import Measured
from headrace.measure.climb_rungs import Rung, WeightFile
from headrace.planner.hardware import Machine

MACHINE = Machine("Zen 4", "avx512", 2, 40e9, {"int8": 800e9, "bf16": 400e9, "f32": 200e9})


def a_step(
    name: str,
    speed: float,
    base: str = "",
    *,
    mode: Any = "batch",
    nll_rise: float | None = None,
    convert: tuple[str, ...] = (),
    format: str = "Q4_1",
) -> Step:
    """A rung with 8-bit KV that did all of the work."""
    return Step(
        rung=Rung(name=name, base=base, text="", mode=mode, options={"kv_dtype": "int8"}),
        weights=WeightFile(weights="own", path="model.gguf", format=format, convert=convert),
        measured=Measured(
            done=[0],
            outputs=[[1]],
            seconds=1.0,
            samples=[1.0],
            first_token=0.1,
            first_tokens=[0.1],
            peak_memory=10**8,
            weight_bytes=10**7,
            drafted=0,
            accepted=0,
            quality=None,
        ),
        share=1.0,
        seconds=1.0,
        tokens_per_second=speed,
        first_token=0.1,
        first_token_of_all=0.2,
        same_as="",
        difference="",
        quality={"nll": 2.0, "kl": 0.01},
        nll_rise=nll_rise,
    )


def a_climb(*steps: Step, **changes: Any) -> Climb:
    steps = steps or (a_step("first", 1.0), a_step("second", 10.0, "first"))
    climb = Climb(
        model="model",
        name="Model",
        format="Q4_1",
        quick=False,
        machine=MACHINE,
        requests=48,
        prompt_tokens=6000,
        output_tokens=2520,
        slots=16,
        steps=steps,
        left_out={},
        limit=1000.0,
        advice=Advice(rung="second", command="headrace serve model", sentence="Run it."),
    )
    return replace(climb, **changes)
