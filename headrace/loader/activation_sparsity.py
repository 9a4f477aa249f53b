"""Applies activation sparsity to programs: zeros that are skipped, and files of thresholds."""

from collections.abc import Mapping

from headrace.backend import lower_program
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.errors import FormatError, RequestError
from headrace.loader.calibration_file import check_calibrated_model, finite, read_calibration
from headrace.model import trace_model
from headrace.program.ops import Linear
from headrace.program.sparsity import (
    has_zero_activations,
    sparse_inputs,
    with_skipped_zeros,
    with_thresholds,
)
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

KIND = "activation_sparsity"
_COMMAND = "headrace calibrate MODEL --sparsity 0.4"


@frozen
class Thresholds:
    """The contents of a file of `headrace calibrate --sparsity`."""

    sparsity: float
    """Share of activations that become 0."""
    by_input: Mapping[str, float]
    """Largest magnitude that becomes 0, by the names of `sparse_inputs`."""


def read_thresholds(option: str, path: str) -> Thresholds:
    """Read the file that an option names. Raises ModelNotFoundError and FormatError."""
    return _parse(option, path, read_calibration(option, path, KIND, _COMMAND))


def sparse_program(config: EngineConfig, program: Program) -> Program:
    """The program of a model with the sparsity of the configuration."""
    return _sparse(config, program, "activation_sparsity", config.activation_sparsity)


def sparse_draft_program(config: EngineConfig, program: Program) -> Program:
    """The same for a self-draft, which may have thresholds of its own."""
    if config.draft_sparsity:
        return _sparse(config, program, "draft_sparsity", config.draft_sparsity)
    return sparse_program(config, program)


def check_activation_sparsity(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raise an error if an option of activation sparsity does not suit the model.

    `checkpoint` is the model as it was opened. Raises ModelNotFoundError, FormatError and
    RequestError.
    """
    if not (config.skip_zeros or config.activation_sparsity or config.draft_sparsity):
        return
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    if config.skip_zeros and not has_zero_activations(program):
        raise RequestError(
            "skip_zeros needs a model whose activation is 0 for some numbers (ReLU), and "
            f"this one has {checkpoint.spec.activation}; leave skip_zeros out, or calibrate "
            f"thresholds with `{_COMMAND}`, which is lossy"
        )
    for option in ("activation_sparsity", "draft_sparsity"):
        path = getattr(config, option)
        if not path:
            continue
        facts = read_calibration(option, path, KIND, _COMMAND)
        thresholds = _parse(option, path, facts)
        check_calibrated_model(option, path, facts.get("model"), checkpoint, _COMMAND)
        if unknown := sorted(thresholds.by_input.keys() - sparse_inputs(program).keys()):
            raise FormatError(
                f"{option} {path!r} has a threshold for {unknown[0]!r}, which is no input of "
                f"this model; make one with `{_COMMAND}`"
            )


def whole_matrices(
    config: EngineConfig, program: Program, tensors: Mapping[str, StoredTensor]
) -> str:
    """A note on the matrices that steps read whole, although some of their activations are 0."""
    wanted = {op.weight.name for op in program.ops if isinstance(op, Linear) and op.density < 1}
    if not wanted or config.traits.on_gpu:
        return ""
    lowered = lower_program(config.backend, program, tensors)
    whole = wanted - {weight.name for op in lowered.ops for weight in op.copies()}
    if not whole:
        return ""
    formats = ", ".join(sorted({tensors[name].format.name for name in whole}))
    return (
        f"{len(whole)} of {len(wanted)} matrices with sparse activations are read whole: they, or "
        f"others with their input, have a format without a copy by columns ({formats})"
    )


def _sparse(config: EngineConfig, program: Program, option: str, path: str) -> Program:
    if path:
        thresholds = read_thresholds(option, path)
        program = with_thresholds(program, thresholds.by_input, 1 - thresholds.sparsity)
    if not config.skip_zeros:
        return program
    if config.traits.on_gpu:
        raise RequestError(
            "skip_zeros is for CPUs: the kernels of GPUs read whole matrices; leave it out"
        )
    return with_skipped_zeros(program)


def _parse(option: str, path: str, facts: Mapping[str, object]) -> Thresholds:
    given, by_input = facts.get("sparsity"), facts.get("thresholds")
    sparsity = finite(given)
    if sparsity is None or not 0 < sparsity < 1:
        raise FormatError(
            f"{option} {path!r} has sparsity {given!r}, not a share from 0 to 1; make one with "
            f"`{_COMMAND}`"
        )
    if not isinstance(by_input, dict) or not all(
        (least := finite(value)) is not None and least >= 0 for value in by_input.values()
    ):
        raise FormatError(
            f"{option} {path!r} has thresholds that are no numbers from 0 on by input; make one "
            f"with `{_COMMAND}`"
        )
    return Thresholds(sparsity, {name: float(least) for name, least in by_input.items()})
