"""Quality, size and speed of a model, plain and quantised."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from headrace.checkpoint.fingerprint import fingerprint
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.config import EngineConfig
from headrace.convert.layer_errors import layer_errors
from headrace.convert.matrices import Target, quantisable
from headrace.convert.methods import METHODS, Method, prepare_model, quantise_matrices
from headrace.convert.quality import Quality, QualityMeter, Scorer
from headrace.convert.spill_file import SpillFile
from headrace.convert.texts import calibration_pieces, read_text, text_pieces
from headrace.errors import RequestError
from headrace.loader.backend_choice import with_backend
from headrace.loader.drafts import model_program
from headrace.loader.key_rounding import key_rounding_of
from headrace.loader.load import open_files
from headrace.loader.mode_price import mode_key, without_modes
from headrace.loader.options import engine_config
from headrace.measure.options import ModelOptions
from headrace.measure.progress import ProgressCallback, ignore_progress, track
from headrace.planner.host import usable_cores
from headrace.planner.prices import Price, keep_price
from headrace.program.trace import Program
from headrace.quant.arrays import Floats
from headrace.quant.encode import ENCODERS
from headrace.quant.format_names import named_format
from headrace.record import frozen
from headrace.validation import integer

if TYPE_CHECKING:
    from headrace.quant.formats import StoredTensor

EXACT_REFERENCE = "exact"
"""The model's own weights, computed in float64 by the reference backend."""
SWEEP_FORMATS = (
    "int8-g32",
    "e4m3-row",
    "int4-g32",
    "int4-g64",
    "nf4-g64",
    "int3-g32",
    "int3-g64",
    "int2-g32",
)
MAX_TOKENS = 2**20
DEFAULT_TEXT = "Python's language reference"
_PRICE_TOKENS = 1024
_GGUF_FORMATS = frozenset(name for name, encoder in ENCODERS.items() if encoder.block > 1)


@frozen(kw_only=True)
class Evaluation:
    """Size, quality and speed of a model in one format."""

    name: str
    weight_bytes: int
    bits: float
    """Bits per weight of the quantisable matrices, scales included."""
    quality: Quality
    prefill: float
    """Tokens/s of one prefill step."""
    decode: float
    """Tokens/s of one sequence."""
    layer_errors: Mapping[int, float]
    """Relative error of each layer's output; empty without `by_layer`."""

    @property
    def loss(self) -> float:
        """KL divergence from the reference, or NLL without a reference, in nats."""
        return self.quality.nll if self.quality.kl is None else self.quality.kl


def evaluate(
    model: str,
    *,
    formats: Sequence[str] = (),
    reference: str | None = None,
    text: Path | str | None = None,
    tokens: int = 4096,
    length: int = 512,
    method: Method = "rtn",
    calibration_text: Path | str | None = None,
    calibration_tokens: int = 16_384,
    by_layer: bool = False,
    on_progress: ProgressCallback = ignore_progress,
    **options: Unpack[ModelOptions],
) -> list[Evaluation]:
    """Evaluate a model on a text, then the model with its matrices in each of `formats`.

    With lossy options the second row is the model in this mode, against the model without them.
    The loss is kept: later runs in the mode print it.

    Args:
        formats: such as `int4-g64` or `Q4_K`.
        reference: model to compare with, or `exact` for the model's own weights in
            float64. By default formats are compared with the model itself.
        text: path of a text; by default a part of Python's language reference.
        tokens: number of evaluated tokens.
        length: tokens of a piece of text, each with an empty KV cache. A piece begins with
            the tokens that the tokenizer adds before a text, usually BOS.
        method: `rtn`, `imatrix`, `gptq`, `awq` or `smoothquant`.
        calibration_text: path of the text that the method reads.
        by_layer: also measure the relative error of each layer's output.
        options: fields of `EngineConfig`.

    Raises RequestError for a format, method or reference that does not fit the model, and for
    formats together with a lossy mode.
    """
    if method not in METHODS:
        raise RequestError(f"method {method!r} is unknown; use {', '.join(METHODS)}")
    integer("length", length, 2, MAX_TOKENS)
    integer("tokens", tokens, 2, MAX_TOKENS)
    targets = {name: target_of(name) for name in formats}
    evaluator = Evaluator(model, options, text, tokens, length, on_progress)
    mode = evaluator.mode
    if mode.lossy and (targets or reference):
        raise RequestError(
            f"a lossy mode ({mode.lossy}) is compared with the same model without it; leave out "
            "formats and reference, or the mode"
        )

    with SpillFile() as log_probabilities:
        full = None
        if reference or targets or mode.lossy:
            full = evaluator.score_reference(reference, log_probabilities)
        results = [evaluator.evaluate(model, evaluator.tensors, log_probabilities)]
        if full and evaluator.checkpoint.loss and reference not in (None, EXACT_REFERENCE):
            evaluator.keep_price(full, results[0].quality)
        if mode.lossy:
            results.append(evaluator.evaluate_mode(log_probabilities))
            evaluator.keep_price(results[0].quality, results[1].quality)
        calibration: list[list[int]] = []
        if method != "rtn" and targets:
            calibration = evaluator.calibration(calibration_text, calibration_tokens)
        for name, target in targets.items():
            original, quantised = evaluator.quantise(name, target, method, calibration)
            errors = evaluator.layer_errors(name, original, quantised) if by_layer else {}
            results.append(evaluator.evaluate(name, quantised, log_probabilities, errors))
        return results


def file_price(out: Path, original: Checkpoint, threads: int, report: ProgressCallback) -> Price:
    """Measure what a converted file lost against its original, on 1,024 tokens."""
    evaluator = Evaluator(str(out), {"threads": threads}, None, _PRICE_TOKENS, 512, report)
    with SpillFile() as log_probabilities:
        full = evaluator.score_reference(original, log_probabilities)
        scorer = evaluator.scorer(evaluator.tensors)
        quality = evaluator.quality(out.name, scorer, log_probabilities)
        scorer.close()
    return measured_price(evaluator.text_name, full, quality)


def measured_price(text: str, full: Quality, lossy: Quality) -> Price:
    """The price of a form that was compared with the full model on a text of this name."""
    assert lossy.kl is not None
    return Price(text=text, tokens=lossy.tokens, nll=lossy.nll, nll_full=full.nll, kl=lossy.kl)


def _spilled(chunks: Iterator[Floats], into: SpillFile) -> Iterator[Floats]:
    for rows in chunks:
        into.add(rows)
        yield rows


class Evaluator:
    """A model with an evaluation text, against which forms of the model are scored."""

    def __init__(
        self,
        model: str,
        options: ModelOptions,
        text: Path | str | None,
        tokens: int,
        length: int,
        on_progress: ProgressCallback,
        spare: int = 0,
    ) -> None:
        """`spare`: tokens that compiled models can hold after a piece of the text."""
        checkpoint = open_files(model, engine_config(options))
        if not checkpoint.spec.has_head:
            raise RequestError(
                f"{model} only computes embeddings: its files have no head (lm_head.weight), so it "
                "gives no probabilities to evaluate"
            )
        self._length = min(length, checkpoint.spec.max_context - spare)
        self._spare = spare
        config = engine_config({**options, "max_model_len": self._length + spare})
        self.mode = with_backend(config, checkpoint)
        """The configuration, with the lossy options."""
        self.config = without_modes(self.mode)
        self._threads = config.threads or usable_cores()
        self.checkpoint = checkpoint
        self._on_progress = on_progress
        self._names = quantisable(checkpoint.spec, checkpoint.tensors)

        words = read_text(Path(text) if text else None, "evaluation")
        self.text_name = Path(text).name if text else DEFAULT_TEXT
        tokenizer = checkpoint.load_tokenizer()
        name = f"text {str(text)!r}"
        self._prefix = len(tokenizer.prefix_ids)
        self.pieces = text_pieces(tokenizer, words, self._length, tokens, name)

    @property
    def tensors(self) -> Mapping[str, "StoredTensor"]:
        return self.checkpoint.tensors

    def calibration(self, text: Path | str | None, tokens: int) -> list[list[int]]:
        file = Path(text) if text else None
        return calibration_pieces(self.checkpoint, file, self._length, tokens)

    def score_reference(self, reference: str | Checkpoint | None, into: SpillFile) -> Quality:
        """Score the text, and keep the log-probabilities. `reference` is a model's name or files,
        or `exact`; None: this model.
        """
        scorer, meter = self._reference_scorer(reference), QualityMeter(self._prefix)
        for piece in self._track_pieces("reference"):
            meter.add(piece, _spilled(scorer.log_probabilities(piece), into), None)
        scorer.close()
        return meter.quality()

    def evaluate(
        self,
        name: str,
        tensors: Mapping[str, "StoredTensor"],
        reference: SpillFile,
        errors: Mapping[int, float] | None = None,
    ) -> Evaluation:
        """Score and time one set of tensors; `reference` may be empty."""
        scorer = self.scorer(tensors)
        try:
            return self._evaluate(name, scorer, reference, errors or {})
        finally:
            scorer.close()

    def evaluate_mode(self, reference: SpillFile) -> Evaluation:
        """Score and time the model with its lossy options."""
        scorer = self.scorer(self.tensors, config=self.mode)
        try:
            return self._evaluate(self.mode.lossy, scorer, reference, {})
        finally:
            scorer.close()

    def keep_price(self, full: Quality, mode: Quality) -> None:
        """Keep the loss of the mode, or of the files, for the runs that print it."""
        tokenizer = self.checkpoint.load_tokenizer()
        price = measured_price(self.text_name, full, mode)
        keep_price(fingerprint(self.checkpoint, tokenizer), mode_key(self.mode), price)

    def _evaluate(
        self,
        name: str,
        scorer: Scorer,
        reference: SpillFile,
        errors: Mapping[int, float],
    ) -> Evaluation:
        quality = self.quality(name, scorer, reference)
        prefill, decode = scorer.speed(self.pieces[0])

        program = scorer.executable.program
        matrices = [program.weights[name] for name in self._names]
        num_weights = sum(weight.rows * weight.cols for weight in matrices)
        return Evaluation(
            name=name,
            weight_bytes=program.weight_bytes,
            bits=8 * sum(weight.nbytes for weight in matrices) / num_weights,
            quality=quality,
            prefill=prefill,
            decode=decode,
            layer_errors=errors,
        )

    def quality(self, name: str, scorer: Scorer, reference: SpillFile) -> Quality:
        """Score the text, against the reference if it has rows; `name` is shown as progress."""
        judge = QualityMeter(self._prefix)
        by_reference = iter(reference) if len(reference) else None
        for piece in self._track_pieces(name):
            judge.add(piece, scorer.log_probabilities(piece), by_reference)
        return judge.quality()

    def quantise(
        self, name: str, target: Target, method: Method, calibration: list[list[int]]
    ) -> tuple[Mapping[str, "StoredTensor"], Mapping[str, "StoredTensor"]]:
        spec = self.checkpoint.spec
        model = prepare_model(
            method,
            spec,
            self.checkpoint.tensors,
            self._names,
            target,
            calibration,
            self._threads,
            self._step(f"{name}: {method}"),
        )
        matrices = quantise_matrices(
            method,
            spec,
            model,
            self._names,
            target,
            calibration,
            self._threads,
            self._step(f"{name}: quantising"),
        )
        quantised = dict(model.tensors)
        quantised.update(matrices)
        return model.tensors, quantised

    def layer_errors(
        self,
        name: str,
        original: Mapping[str, "StoredTensor"],
        quantised: Mapping[str, "StoredTensor"],
    ) -> dict[int, float]:
        return layer_errors(
            self.checkpoint.spec,
            original,
            quantised,
            self._names,
            self.pieces,
            self._threads,
            self._step(f"{name}: layer errors"),
        )

    def _track_pieces(self, step: str) -> Iterator[list[int]]:
        return track(self.pieces, len(self.pieces), step, self._on_progress)

    def _step(self, step: str) -> Callable[[float], None]:
        return lambda share: self._on_progress(step, share)

    def _reference_scorer(self, reference: str | Checkpoint | None) -> Scorer:
        checkpoint = self.checkpoint
        if reference is None:
            return self.scorer(checkpoint.tensors)
        if reference == EXACT_REFERENCE:
            return self.scorer(checkpoint.tensors, config=replace(self.config, backend="reference"))
        other = reference
        if isinstance(other, str):
            other = open_checkpoint(resolve(other))
        size, expected = other.spec.vocab_size, checkpoint.spec.vocab_size
        if size != expected:
            raise RequestError(
                f"reference {reference!r} has {size:,} tokens in its vocabulary, and the model has "
                f"{expected:,}; use a model with the same vocabulary"
            )
        return self.scorer(other.tensors, other)

    def scorer(
        self,
        tensors: Mapping[str, "StoredTensor"],
        checkpoint: Checkpoint | None = None,
        config: EngineConfig | None = None,
    ) -> Scorer:
        """Compile `tensors`: by default in this model, without its lossy options."""
        checkpoint = replace(checkpoint or self.checkpoint, tensors=tensors)
        config = config or self.config
        return self.compile(model_program(config, checkpoint), checkpoint, config)

    def compile(self, program: Program, checkpoint: Checkpoint, config: EngineConfig) -> Scorer:
        return Scorer(
            program,
            checkpoint.tensors,
            self._length + self._spare,
            config.backend,
            self._threads,
            config.kv_format,
            config.activations,
            key_rounding_of(config, checkpoint),
        )


def target_of(name: str) -> Target:
    return name.upper() if name.upper() in _GGUF_FORMATS else named_format(name)
