"""The forms of a model that a frontier compares: number formats, and lossy modes.

A mode is an entry of `_MODES`: a function that lists its rungs for a model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.config import EngineConfig
from headrace.errors import RequestError
from headrace.loader.drafts import model_program
from headrace.loader.self_draft import own_tensors, with_own_names
from headrace.measure.climb_process import run_command
from headrace.measure.evaluate import SWEEP_FORMATS, Evaluator, target_of
from headrace.measure.options import ModeOptions
from headrace.measure.placed_model import main_format
from headrace.model import trace_model
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.quant.kv import BLOCK_SIZE
from headrace.quant.spec import QuantSpec
from headrace.record import frozen

_QUICK_FORMATS = ("int8-g32", "int4-g32", "int3-g32")


@frozen(eq=False)
class Form:
    """A form of the full model: its tensors, layers and lossy options."""

    checkpoint: Checkpoint
    config: EngineConfig
    layers: tuple[int, ...] | None = None
    """None: all."""

    @property
    def program(self) -> Program:
        checkpoint = self.checkpoint
        if self.layers is not None:
            checkpoint = replace(checkpoint, spec=checkpoint.spec.with_layers(self.layers))
        return model_program(self.config, checkpoint)

    def over(self, full: Checkpoint) -> tuple[Program, Mapping[str, StoredTensor]]:
        """The program over weights of `full`, and all tensors; equal tensors are shared."""
        own = own_tensors(self.checkpoint.tensors, full.tensors)
        return with_own_names(self.program, own), {**full.tensors, **own}


@frozen(eq=False)
class Rung:
    """A form of a model that is made when its turn comes."""

    name: str
    kind: str
    make: Callable[[], Form]
    """Raises HeadraceError if the model cannot have the form."""


@frozen(eq=False)
class Workshop:
    """A model, and what its forms are made with."""

    evaluator: Evaluator
    folder: Path
    """An empty folder for files."""
    formats: Sequence[str]
    """Number formats that the caller named; empty: the usual ones."""
    files: Mapping[str, str]
    """Models that the caller names as forms, by the names of the forms."""
    is_quick: bool

    @property
    def checkpoint(self) -> Checkpoint:
        return self.evaluator.checkpoint

    @property
    def config(self) -> EngineConfig:
        return self.evaluator.config

    def mode(self, name: str, kind: str, **options: Unpack[ModeOptions]) -> Rung:
        """A rung of the model with lossy options."""
        return Rung(name, kind, lambda: Form(self.checkpoint, replace(self.config, **options)))

    def with_tensors(self, tensors: Mapping[str, StoredTensor]) -> Form:
        return Form(replace(self.checkpoint, tensors=tensors), self.config)

    def opened(self, name: str, kind: str) -> Rung:
        """A rung of the caller's file."""
        return Rung(name, kind, lambda: Form(self._open(self.files[name]), self.config))

    def _open(self, model: str) -> Checkpoint:
        """Raises RequestError for another model, ModelError as `open_checkpoint`."""
        checkpoint, spec = open_checkpoint(resolve(model)), self.checkpoint.spec
        groups = trace_model(checkpoint.spec, checkpoint.tensors).kv_groups
        full = trace_model(spec, self.checkpoint.tensors).kv_groups
        if groups != full or checkpoint.spec.vocab_size != spec.vocab_size:
            raise RequestError(
                f"form '{model}' has other KV or another vocabulary than the model; name a file "
                "of the same model, such as a result of `headrace convert`"
            )
        return checkpoint

    def converted(self, name: str, kind: str, arguments: Sequence[str]) -> Rung:
        """A rung of the model that `headrace convert` writes with these arguments.

        A file of the caller takes its place.
        """
        if name in self.files:
            return self.opened(name, kind)
        out = self.folder / name.replace(":", "-").replace(" ", "-")
        calibration = ("--calibration-tokens", "2048" if self.is_quick else "8192")

        def make() -> Form:
            path = str(self.checkpoint.path)
            run_command("convert", path, str(out), *arguments, *calibration)
            return Form(open_checkpoint(out), self.config)

        return Rung(name, kind, make)


def rungs_of(workshop: Workshop) -> list[Rung]:
    """All forms that the model may have, from formats to modes."""
    rungs = [rung for mode in _MODES for rung in mode(workshop)]
    others = workshop.files.keys() - {rung.name for rung in rungs}
    return rungs + [workshop.opened(name, "file") for name in sorted(others)]


def _formats(workshop: Workshop) -> Iterator[Rung]:
    """Number formats with fewer bits than the model's own."""
    usual = _QUICK_FORMATS if workshop.is_quick else SWEEP_FORMATS
    own_bits = main_format(workshop.checkpoint).bits

    def make(name: str) -> Form:
        return workshop.with_tensors(
            workshop.evaluator.quantise(name, target_of(name), "rtn", [])[1]
        )

    for name in workshop.formats or usual:
        target = target_of(name)
        is_smaller = not isinstance(target, QuantSpec) or target.bits < own_bits
        if workshop.formats or is_smaller:
            yield Rung(name, "format", lambda name=name: make(name))  # type: ignore[misc]


def _windows(workshop: Workshop) -> Iterator[Rung]:
    """Attention windows of a part of the measured context."""
    length = len(workshop.evaluator.pieces[0])
    for share in (4,) if workshop.is_quick else (2, 4, 8):
        if window := length // share:
            yield workshop.mode(f"window {window:,}", "attention", attention_window=window)


def _top_blocks(workshop: Workshop) -> Iterator[Rung]:
    """A part of the measured context's blocks of KV."""
    blocks = len(workshop.evaluator.pieces[0]) // BLOCK_SIZE
    for share in (4,) if workshop.is_quick else (2, 4, 8):
        if count := blocks // share:
            yield workshop.mode(f"top {count:,} blocks", "attention", attention_top_blocks=count)


def _layers(workshop: Workshop) -> Iterator[Rung]:
    """First layers, in eighths of all."""
    num_layers = workshop.checkpoint.spec.num_layers
    for eighths in (6,) if workshop.is_quick else (4, 6, 7):
        count = num_layers * eighths // 8
        if 0 < count < num_layers:
            layers = tuple(range(count))
            yield Rung(
                f"{count} of {num_layers} layers",
                "layers",
                lambda layers=layers: Form(workshop.checkpoint, workshop.config, layers),  # type: ignore[misc]
            )


def _sparse(workshop: Workshop) -> Iterator[Rung]:
    """2:4 weights by SparseGPT, with values of as many bits as the model's own, or fewer."""
    own_bits = main_format(workshop.checkpoint).bits
    values = {"bf16": 16, "int8-g32": 8, "int4-g32": 4}
    fitting = [name for name, bits in values.items() if bits <= own_bits]
    for name in fitting[-1:] if workshop.is_quick else fitting:
        arguments = ("--sparsity", "2:4", "--to", name)
        yield workshop.converted(f"2:4 {name}", "2:4", arguments)


def _experts(workshop: Workshop) -> Iterator[Rung]:
    """FFNs cut into eight experts, in numbers of about as many bits as the model's own."""
    own_bits = main_format(workshop.checkpoint).bits
    values = "int4-g32" if own_bits < 8 else "int8-g32" if own_bits < 16 else "bf16"
    for active in (6,) if workshop.is_quick else (6, 4):
        arguments = ("--moefy", "8", "--active", str(active), "--to", values)
        yield workshop.converted(f"{active} of 8 experts", "experts", arguments)


_MODES: tuple[Callable[[Workshop], Iterator[Rung]], ...] = (
    _formats,
    _sparse,
    _experts,
    _windows,
    _top_blocks,
    _layers,
)
