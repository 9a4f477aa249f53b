"""What `headrace eval` measures: the model, and each way to quantise it, on the same pieces of a
text, beside one reference.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.cli.calibrating import calibration_pieces
from headrace.convert.layer_errors import layer_errors
from headrace.convert.matrices import Target, quantisable
from headrace.convert.methods import prepare_model, quantise_matrices
from headrace.convert.quality import Quality, QualityMeter, Scorer, split_pieces
from headrace.convert.spill_file import SpillFile
from headrace.convert.texts import read_text
from headrace.errors import RequestError
from headrace.loader.backend_choice import with_backend
from headrace.loader.options import engine_config
from headrace.planner.host import usable_cores
from headrace.quant.encode import ENCODERS
from headrace.quant.format_names import named_format

if TYPE_CHECKING:
    from rich.progress import Progress

    from headrace.quant.formats import StoredTensor

EXACT = "exact"
SWEEP = (
    "int8-g32",
    "e4m3-row",
    "int4-g32",
    "int4-g64",
    "nf4-g64",
    "int3-g32",
    "int3-g64",
    "int2-g32",
)
"""Formats that a sweep tries where none are named: those that files of models have, at each number
of bits.
"""
BLOCKS = frozenset(name for name, encoder in ENCODERS.items() if encoder.block > 1)
"""Formats of GGUF files that a sweep knows by their names."""


class Row(NamedTuple):
    """A model, or a way to quantise it, and how it did."""

    name: str
    weight_bytes: int
    """Of all weights, as they lie in memory."""
    bits: float
    """Of a weight that is quantised or could be, scales included."""
    quality: Quality
    prefill: float
    """Tokens/s of one piece."""
    decode: float
    """Tokens/s of one sequence."""
    layer_errors: Mapping[int, float]
    """How much of its output each layer loses by itself, where that was asked for."""

    @property
    def loss(self) -> float:
        """The divergence from the reference, or without one the NLL."""
        return self.quality.nll if self.quality.kl is None else self.quality.kl


class Evaluation:
    """A model and a text to judge it by. Raises RequestError for formats and references that do not
    fit the model.
    """

    def __init__(self, args: argparse.Namespace, bar: "Progress") -> None:
        self._args, self._bar = args, bar
        names = [name for name in (args.formats or "").split(",") if name] or list(
            SWEEP if args.sweep else ()
        )
        self._formats = {
            name: name.upper() if name.upper() in BLOCKS else named_format(name) for name in names
        }
        self._checkpoint = open_checkpoint(resolve(args.model))
        self._threads = args.threads or usable_cores()
        self._length = min(args.length, self._checkpoint.spec.max_context)
        options = {name: getattr(args, name) for name in ("backend", "kv_dtype", "activations")}
        self._backend = with_backend(
            engine_config(options | {"max_model_len": self._length}), self._checkpoint
        ).backend
        ids = self._checkpoint.load_tokenizer().encode(
            read_text(args.text, "evaluation"), add_special=False, parse_special=False
        )
        if len(ids) < 2:
            raise RequestError("a text to judge by has two tokens at least")
        self._pieces = split_pieces(ids, self._length, args.tokens)
        self._names = quantisable(self._checkpoint.spec, self._checkpoint.tensors)

    def rows(self) -> list[Row]:
        """The model as it is, then each of its formats."""
        tensors = self._checkpoint.tensors
        with SpillFile() as said:
            if self._args.reference or self._formats:
                scorer = self._reference()
                for piece in self._bar.track(self._pieces, description="the reference"):
                    for some in scorer.log_probabilities(piece):
                        said.add(some)
                scorer.close()
            rows = [self._row(self._args.model, tensors, said, {})]
            calibration = (
                calibration_pieces(self._args, self._checkpoint)
                if self._args.method != "rtn" and self._formats
                else []
            )
            for name, to in self._formats.items():
                quantised, errors = self._quantised(name, to, calibration)
                rows.append(self._row(name, quantised, said, errors))
        return rows

    def _quantised(
        self, name: str, to: Target, calibration: list[list[int]]
    ) -> tuple[dict[str, "StoredTensor"], dict[int, float]]:
        """All tensors with the matrices in this format, and what each layer loses."""
        spec, names, method = self._checkpoint.spec, self._names, self._args.method
        model = prepare_model(
            method,
            spec,
            self._checkpoint.tensors,
            names,
            to,
            calibration,
            self._threads,
            self._told(f"{name}: {method}"),
        )
        matrices = quantise_matrices(method, spec, model, names, to, calibration, self._threads)
        result = dict(model.tensors)
        result.update(self._bar.track(matrices, total=len(names), description=f"to {name}"))
        if not self._args.by_layer:
            return result, {}
        tell = self._told(f"{name}: layer by layer")
        return result, layer_errors(
            spec, model.tensors, result, names, self._pieces, self._threads, tell
        )

    def _told(self, what: str) -> Callable[[float], None]:
        task = self._bar.add_task(what, total=1.0)

        def tell(done: float) -> None:
            self._bar.update(task, completed=done, visible=done < 1)

        return tell

    def _reference(self) -> Scorer:
        named = self._args.reference
        if named in (None, EXACT):
            return self._scorer(
                self._checkpoint, self._checkpoint.tensors, "reference" if named else ""
            )
        other, spec = open_checkpoint(resolve(named)), self._checkpoint.spec
        if other.spec.vocab_size != spec.vocab_size:
            sizes = f"{other.spec.vocab_size:,} and {spec.vocab_size:,}"
            raise RequestError(
                f"--reference {named}: its vocabulary is another one ({sizes} tokens)"
            )
        return self._scorer(other, other.tensors)

    def _scorer(
        self, checkpoint: Checkpoint, tensors: Mapping[str, "StoredTensor"], backend: str = ""
    ) -> Scorer:
        args = self._args
        return Scorer(
            checkpoint.spec,
            tensors,
            self._length,
            backend or self._backend,
            self._threads,
            args.kv_dtype,
            args.activations,
        )

    def _row(
        self,
        name: str,
        tensors: Mapping[str, "StoredTensor"],
        said: SpillFile,
        errors: Mapping[int, float],
    ) -> Row:
        """How one model does; `said` is what the reference said, if there is one."""
        scorer, judge = self._scorer(self._checkpoint, tensors), QualityMeter()
        by_reference = iter(said) if len(said) else None
        for piece in self._bar.track(self._pieces, description=name):
            judge.add(piece, scorer.log_probabilities(piece), by_reference)
        prefill, decode = scorer.speed(self._pieces[0])
        program = scorer.executable.program
        matrices = [program.weights[name] for name in self._names]
        bits = 8 * sum(w.nbytes for w in matrices) / sum(w.rows * w.cols for w in matrices)
        scorer.close()
        return Row(name, program.weight_bytes, bits, judge.quality(), prefill, decode, errors)
