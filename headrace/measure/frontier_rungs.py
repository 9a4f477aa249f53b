"""The forms of a model that a frontier compares: number formats, and lossy modes.

A mode is an entry of `_MODES`: a function that lists its rungs for a model.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, Unpack

from headrace.backend_traits import KvDtype
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.config import EngineConfig
from headrace.errors import RequestError
from headrace.loader.activation_sparsity import check_activation_sparsity
from headrace.loader.drafts import model_program
from headrace.loader.early_exit import check_early_exit, with_early_exit, with_exit_map
from headrace.loader.self_draft import own_tensors, with_own_names
from headrace.measure.activation_sparsity import write_thresholds
from headrace.measure.climb_process import run_command
from headrace.measure.early_exit import calibrate_early_exit
from headrace.measure.evaluate import SWEEP_FORMATS, Evaluator, target_of
from headrace.measure.options import ModeOptions
from headrace.measure.placed_model import main_format
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.model import trace_model
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.quant.kv import BLOCK_SIZE
from headrace.quant.spec import QuantSpec
from headrace.record import frozen

CalibratedOption = Literal["activation_sparsity", "early_exit"]
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

    @property
    def before_exit(self) -> "Form | None":
        """The layers before an early exit; None without one."""
        if not self.config.early_exit:
            return None
        exit = with_early_exit(self.checkpoint.spec, self.config).early_exit
        assert exit, "the configuration has an exit"
        return replace(self, layers=tuple(range(exit.num_layers)))

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
    """A folder for files, which may have those of an earlier run."""
    formats: Sequence[str]
    """Number formats that the caller named; empty: the usual ones."""
    files: Mapping[str, str]
    """Models and calibration files that the caller names as forms, by the names of the forms."""
    is_quick: bool
    on_progress: ProgressCallback = ignore_progress

    @property
    def checkpoint(self) -> Checkpoint:
        return self.evaluator.checkpoint

    @property
    def config(self) -> EngineConfig:
        return self.evaluator.config

    @cached_property
    def full(self) -> Form:
        return Form(self.checkpoint, self.config)

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
        out = self.folder / _file_name(name)
        calibration = ("--calibration-tokens", "2048" if self.is_quick else "8192")

        def make() -> Form:
            if not out.exists():
                begun = out.with_name(f"{out.name}.begun")
                shutil.rmtree(begun, ignore_errors=True)
                path = str(self.checkpoint.path)
                run_command("convert", path, str(begun), *arguments, *calibration)
                begun.rename(out)
            return Form(open_checkpoint(out), self.config)

        return Rung(name, kind, make)

    def calibrated(
        self, name: str, option: CalibratedOption, calibrate: Callable[[Path], None]
    ) -> Rung:
        """A rung of a lossy option whose file `calibrate` writes.

        A file of the caller takes its place.
        """
        out = self.folder / f"{_file_name(name)}.json"

        def make() -> Form:
            file = Path(self.files[name]) if name in self.files else out
            if not (name in self.files or out.exists()):
                calibrate(out)
            mode: ModeOptions = {option: str(file)}  # type: ignore[misc]
            config = replace(self.config, **mode)
            check_early_exit(config, self.checkpoint)
            check_activation_sparsity(config, self.checkpoint)
            return Form(with_exit_map(self.checkpoint, config), config)

        return Rung(name, option, make)


def _file_name(form: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", form.lower()).strip("-")


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


def _kv_formats(workshop: Workshop) -> Iterator[Rung]:
    """Number formats of KV with fewer bits than the model's own."""
    config = workshop.config
    dtypes: tuple[KvDtype, ...] = ("int4",) if workshop.is_quick else ("int8", "k8v4", "int4")
    for dtype in dtypes:
        if dtype in config.traits.kv_dtypes and config.kv_format in ("f32", "f16", "bf16"):
            form = Form(workshop.checkpoint, replace(config, kv_dtype=dtype))
            yield Rung(f"{dtype} KV", "KV format", lambda form=form: form)  # type: ignore[misc]


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


def _sparsity(workshop: Workshop) -> Iterator[Rung]:
    """Shares of activations that thresholds of their magnitude set to 0 (TEAL)."""
    tokens = 2048 if workshop.is_quick else 4096

    def calibrate(share: float, file: Path) -> None:
        write_thresholds(
            file, workshop.checkpoint, share, tokens=tokens, on_progress=workshop.on_progress
        )

    for share in (0.4,) if workshop.is_quick else (0.25, 0.4):
        yield workshop.calibrated(
            f"{share:.0%} zeros", "activation_sparsity", partial(calibrate, share)
        )


def _early_exits(workshop: Workshop) -> Iterator[Rung]:
    """Exits whose tokens differ from the full model's with a bounded share."""
    tokens = 4096 if workshop.is_quick else 16_384

    def calibrate(bound: float, file: Path) -> None:
        found = calibrate_early_exit(
            str(workshop.checkpoint.path),
            bound,
            tokens=tokens,
            backend=workshop.config.backend,
            threads=workshop.config.threads,
            on_progress=workshop.on_progress,
        )
        if not found.chosen:
            raise RequestError(
                f"no exit keeps {bound:.0%} disagreement on {tokens:,} tokens of text"
            )
        found.write(file)

    for bound in (0.1,) if workshop.is_quick else (0.05, 0.1):
        name = f"exit within {bound:.0%}"
        yield workshop.calibrated(name, "early_exit", partial(calibrate, bound))


_MODES: tuple[Callable[[Workshop], Iterator[Rung]], ...] = (
    _formats,
    _sparse,
    _experts,
    _windows,
    _top_blocks,
    _kv_formats,
    _layers,
    _sparsity,
    _early_exits,
)
