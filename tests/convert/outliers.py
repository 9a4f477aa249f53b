"""Models whose norms produce single columns that are much larger than all others, as in
large models: the same functions in floats.

`python -m tests.convert.outliers MODEL` prints the cost of W8A8 on such a variant of a
real model: rounded to nearest, with wide outliers (LLM.int8), and with SmoothQuant,
next to the unchanged model.
"""

import sys

import numpy as np

from headrace.convert.matrices import quantisable
from headrace.convert.quality import Quality, QualityMeter, Scorer
from headrace.convert.scaling import Scalings, scaling_groups
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.quant.format_names import LLM_INT8, W8A8
from tests.convert.conversion import quantise
from tests.tiny import Tensors

FACTOR = 60.0
"""Factor of the outlier columns."""
EVERY = 64
"""The share of outlier columns: one in EVERY."""


def with_outliers(
    spec: ModelSpec, tensors: Tensors, seed: int = 0, *, same_function: bool = True
) -> Tensors:
    """Multiply random columns of each norm's output by FACTOR, and divide the columns
    of their readers.

    Not `same_function`: readers stay as they are, so that the columns of weights keep
    their size.
    """
    rng, scalings = np.random.default_rng(seed), Scalings()
    for group in scaling_groups(trace_model(spec, tensors), quantisable(spec, tensors)):
        if all(len(tensors[name].shape) == 1 for name in group.producers):
            factors = np.ones(len(group.columns), np.float32)
            factors[rng.permutation(len(factors))[: len(factors) // EVERY]] = 1 / FACTOR
            scalings.add(group, factors)
    if not same_function:
        scalings.columns.clear()
    return scalings.apply_all(tensors, ())


def judged(
    spec: ModelSpec, reference: Tensors, tensors: Tensors, pieces: list[list[int]], threads: int = 1
) -> Quality:
    """The divergence of a model from the reference on pieces of text."""
    judge = QualityMeter()
    truth, ours = (
        Scorer(trace_model(spec, each), each, max(map(len, pieces)), "cpu", threads)
        for each in (reference, tensors)
    )
    for piece in pieces:
        judge.add(piece, ours.log_probabilities(piece), truth.log_probabilities(piece))
    truth.close()
    ours.close()
    return judge.quality()


def main(model: str, calibration_tokens: int = 4096, tokens: int = 1024, length: int = 512) -> None:
    """Print the divergence KL of each variant."""
    from headrace.checkpoint.load import open_checkpoint
    from headrace.checkpoint.source import resolve
    from headrace.convert.texts import calibration_pieces, read_text, text_pieces
    from headrace.planner.host import usable_cores

    checkpoint = open_checkpoint(resolve(model))
    spec, tensors = checkpoint.spec, dict(checkpoint.tensors)
    calibration = calibration_pieces(checkpoint, None, length, calibration_tokens)
    pieces = text_pieces(
        checkpoint.load_tokenizer(), read_text(None, "evaluation"), length, tokens, "the text"
    )
    names, threads = quantisable(spec, tensors), usable_cores()
    for title, variant in (("as it is", tensors), ("with outliers", with_outliers(spec, tensors))):
        results = {
            "floats": variant,
            "w8a8, rtn": quantise("rtn", spec, variant, names, W8A8),
            "llm-int8": quantise("rtn", spec, variant, names, LLM_INT8),
            "w8a8, smoothquant": quantise(
                "smoothquant", spec, variant, names, W8A8, calibration, threads
            ),
        }
        for way, result in results.items():
            quality = judged(spec, tensors, result, pieces, threads)
            print(
                f"{title}, {way}: NLL {quality.nll:.4f}, KL {quality.kl:.4f}, same top "
                f"{quality.agreement:.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1])
