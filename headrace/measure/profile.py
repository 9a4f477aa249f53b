"""Profile of a model: the time of each op, next to its roofline limit."""

from collections.abc import Sequence
from typing import NamedTuple, Unpack

from headrace.backend import lower_program
from headrace.batch import StepTimes
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.config import EngineConfig
from headrace.errors import MemoryLimitError, RequestError
from headrace.loader.backend_choice import with_backend
from headrace.loader.drafts import model_program
from headrace.loader.load import open_files
from headrace.loader.memory import memory_for
from headrace.loader.options import engine_config
from headrace.measure.experts import ExpertProfile, expert_profile
from headrace.measure.op_profile import Phase, account_phase, median_machine, phases
from headrace.measure.options import EngineOptions
from headrace.measure.phase_timer import PhaseTimer, num_blocks
from headrace.measure.profile_report import ProfileReport
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.model import trace_model
from headrace.planner import hardware
from headrace.planner.fit import Fit
from headrace.planner.hardware import READ_BYTES, Machine
from headrace.planner.utilisation import UseMeter, planned, roofs_of
from headrace.program.kv import number_bytes, token_bytes
from headrace.program.moe import Experts
from headrace.program.trace import Program

PREFILL = (512, 2048)
DEPTHS = (128, 2048)
BATCHES = (1, 4, 8, 16, 32)


def profile(
    model: str,
    *,
    prefill: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    batches: Sequence[int] = BATCHES,
    turns: int = 5,
    on_progress: ProgressCallback = ignore_progress,
    **options: Unpack[EngineOptions],
) -> ProfileReport:
    """Profile prefills and decode steps, op by op.

    Args:
        prefill: prompt lengths in tokens; by default 512 and 2048, if they fit.
        depths: tokens of context to decode at; by default 128 and 2048, if they fit.
        batches: numbers of sequences that decode together.
        turns: times that each phase is timed.
        options: fields of `EngineConfig`.

    Raises RequestError if a length exceeds the context or no phase remains, and
    MemoryLimitError.
    """
    config = engine_config(options)
    checkpoint = open_files(model, config)
    config = with_backend(config, checkpoint)
    traced = model_program(config, checkpoint)
    context = checkpoint.spec.max_context
    _check_lengths("prefill", prefill or (), context, context)
    _check_lengths("depth", depths or (), context, context - 1)

    requested = phases(
        PREFILL if prefill is None else prefill,
        DEPTHS if depths is None else depths,
        batches,
        number_bytes(traced.kv_groups, config.kv_format),
    )
    fitting, skipped = _fitting_phases(requested, checkpoint, config)
    measured = _measure(model, checkpoint, config, fitting, turns, on_progress)
    machine = median_machine(measured.machines)
    meter = UseMeter(
        measured.program,
        number_bytes(traced.kv_groups, config.kv_format),
        roofs_of(machine),
        planned(measured.program, config.backend, config.threads, machine),
    )
    profiles = [
        account_phase(phase, measured.program, machine, rounds)
        for phase, rounds in zip(fitting, measured.rounds, strict=True)
    ]
    return ProfileReport(
        model=model,
        spec=checkpoint.spec,
        kv_dtype=config.kv_format,
        machines=measured.machines,
        machine=machine,
        profiles=profiles,
        uses=[meter.of_launches(profile.phase.steps, profile.wall) for profile in profiles],
        skipped=skipped,
        experts=measured.experts,
    )


def has_experts(model: str) -> bool:
    checkpoint = open_checkpoint(resolve(model))
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    return any(isinstance(op, Experts) for op in program.ops)


def _check_lengths(name: str, lengths: Sequence[int], context: int, max_length: int) -> None:
    longest = max(lengths, default=0)
    if longest > max_length:
        raise RequestError(
            f"{name} {longest:,} is too long for the model's context of {context:,} tokens; use "
            f"at most {max_length:,}"
        )


def _fitting_phases(
    requested: Sequence[Phase], checkpoint: Checkpoint, config: EngineConfig
) -> tuple[list[Phase], dict[str, str]]:
    """The phases that fit in context and memory; and the reason of each other phase, by name."""
    spec = checkpoint.spec
    program = lower_program(config.backend, model_program(config, checkpoint), checkpoint.tensors)
    kv_per_token = token_bytes(program.kv_groups, config.kv_format)
    block_size = config.traits.kv_block_size
    memory = memory_for(config, program)
    fit = Fit(
        memory=memory.available,
        weights=program.weight_bytes,
        kv_per_sequence=spec.max_context * kv_per_token,
        context=spec.max_context,
        to_run=memory.runtime,
    )
    budget = fit.kv_budget - READ_BYTES
    if budget <= 0:
        place = "GPU" if memory.on_gpu else "machine"
        state = "free on the GPU" if memory.on_gpu else "available"
        raise MemoryLimitError(
            f"{program.weight_bytes:,} bytes of weights are too large for this {place}: "
            f"{fit.memory:,} bytes are {state}; use a smaller model"
        )

    fitting: list[Phase] = []
    skipped: dict[str, str] = {}
    lacks_memory = False
    for phase in requested:
        kv_bytes = num_blocks(phase, block_size) * block_size * kv_per_token
        logit_bytes = 4 * phase.seqs * spec.vocab_size
        if phase.length > spec.max_context:
            skipped[phase.name] = (
                f"needs {phase.length:,} tokens of context, and the model's ends at "
                f"{spec.max_context:,}"
            )
        elif kv_bytes + logit_bytes > budget:
            skipped[phase.name] = (
                f"needs {kv_bytes + logit_bytes:,} bytes for KV and logits, and the weights leave "
                f"{budget:,}"
            )
            lacks_memory = True
        else:
            fitting.append(phase)
    if not fitting:
        reasons = "; ".join(f"{name} {reason}" for name, reason in skipped.items())
        raise (MemoryLimitError if lacks_memory else RequestError)(
            f"no phase to profile: {reasons or 'set prefill, or depth and batch'}"
        )
    return fitting, skipped


class _Measured(NamedTuple):
    program: Program
    rounds: list[list[list[StepTimes]]]
    machines: list[Machine]
    experts: list[ExpertProfile]


def _measure(
    model: str,
    checkpoint: Checkpoint,
    config: EngineConfig,
    fitting: Sequence[Phase],
    turns: int,
    on_progress: ProgressCallback,
) -> _Measured:
    """Time all phases turn by turn, so that a busy moment slows a part of each phase only."""
    on_progress("loading", 0.0)
    block_size = config.traits.kv_block_size
    blocks = max(num_blocks(phase, block_size) for phase in fitting)
    timer = PhaseTimer(model, checkpoint, config, blocks)
    try:
        rounds: list[list[list[StepTimes]]] = [[] for _ in fitting]
        machines = []
        for turn in range(turns):
            machines.append(hardware.measure(config.threads, config.backend))
            for number, phase in enumerate(fitting):
                share = (turn * len(fitting) + number) / (turns * len(fitting))
                on_progress(phase.name, share)
                rounds[number] += timer.time_phase(phase)
        program = timer.executable.program
        experts = []
        if any(isinstance(op, Experts) for op in program.ops):
            experts = [
                expert_profile(phase, program, timer.expert_rows(phase)) for phase in fitting
            ]
        machines.append(hardware.measure(config.threads, config.backend))
        return _Measured(program, rounds, machines, experts)
    finally:
        timer.close()
