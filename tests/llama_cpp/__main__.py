"""`make gguf`: llama.cpp judges our GGUF routes.

For every variant of a family, llama.cpp's converter makes a GGUF file. Our two routes
must give the same tensors and specification, our logits on the file must equal
llama.cpp's, and the file of our own converter must be the same model to llama.cpp. The
results go to tests/data/gguf, for the short form in `make test` and for the table of
docs/use/families.md.

On files of a Llama with looked-up or table types, our logits must be near to
llama.cpp's, which rounds rows to 8 bits. For files that we write, the mixtures must
have llama.cpp's formats, and its quantised blocks must not be nearer to the values than
ours.

   python -m tests.llama_cpp              # all cases
   python -m tests.llama_cpp gpt2 IQ2_XS  # some cases; no result is written
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import transformers
from engines import ENGINES
from engines.process import BENCH, Unavailable, interpreter

from headrace.errors import UnsupportedModelError
from tests.convert.conversion import to_gguf
from tests.llama_cpp import block_errors, fixtures, mixtures
from tests.llama_cpp.convert import convert
from tests.llama_cpp.judge import (
    ROUNDED_TOLERANCE,
    ROUNDED_TYPE_TOLERANCE,
    TOLERANCE,
    Logits,
    differences,
    our_logits,
    relative_error,
)
from tests.llama_cpp.models import (
    CASES,
    NOT_CONVERTED,
    NOT_RUN,
    REFUSED,
    TOKENS,
    UNSAID,
    save_coarse,
    save_tokenizer,
)
from tests.oracle.test_gguf_types import TYPES, write

(PACKAGE,) = (word for word in ENGINES["llama.cpp"].pip[0].split() if "==" in word)
WORKER = Path(__file__).with_name("worker.py")


class LlamaCpp(NamedTuple):
    """An interpreter that has llama.cpp, and its sources."""

    python: str
    source: Path

    def logits(self, file: Path) -> Logits | None:
        """The logits of all tokens, or None if the file does not load."""
        out = file.with_suffix(".npy")
        command = [self.python, str(WORKER), str(file), json.dumps(TOKENS), str(out)]
        result = subprocess.run(command, capture_output=True, env=environment(), timeout=300)
        return np.load(out) if result.returncode == 0 else None


def environment() -> dict[str, str]:
    """The environment of the interpreter, with its own packages only."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def checked(python: str) -> str:
    """The interpreter, if it has that version."""
    command = [
        python,
        "-c",
        "import llama_cpp; print('llama-cpp-python==' + llama_cpp.__version__)",
    ]
    if (has := subprocess.run(command, capture_output=True, text=True).stdout.strip()) != PACKAGE:
        sys.exit(f"{python} has {has or 'no llama-cpp-python'}, not {PACKAGE}")
    return python


def sources() -> Path:
    """llama.cpp's sources from the source package of llama-cpp-python, downloaded on
    first use.
    """
    folder = BENCH / "llama.cpp-source"
    vendored = folder / PACKAGE.replace("-", "_").replace("==", "-") / "vendor" / "llama.cpp"
    if not vendored.exists():
        print(f"downloading the sources of {PACKAGE}, once", file=sys.stderr)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            PACKAGE.partition("==")[0],
        ]
        subprocess.run([*pip, "-d", str(folder), PACKAGE], check=True)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    return vendored


def verdict(name: str, llama: LlamaCpp, scratch: Path) -> fixtures.Verdict:
    """Judge a case."""
    folder, file = (
        scratch / name / "tiny",
        scratch / f"{name}.gguf",
    )  # llama.cpp looks for special tokens in what is called phi-3
    save_coarse(name, folder)
    try:
        convert(llama.source, folder, file)
    except (NotImplementedError, ValueError) as error:
        return fixtures.Verdict(name in NOT_CONVERTED, f"not converted: {error}")
    if name in NOT_CONVERTED:
        return fixtures.Verdict(False, "it is converted now")
    theirs = llama.logits(file)
    if theirs is None or name in NOT_RUN:
        return fixtures.Verdict(
            theirs is None and name in NOT_RUN, "not run" if theirs is None else "it is run now"
        )
    different = differences(folder, file)
    ours = [our_logits(file, TOKENS, like_theirs) for like_theirs in (False, True)]
    errors = [relative_error(logits, theirs) for logits, _ in ours]
    wrong = converted_by_us(name, llama, folder, theirs)
    right = errors[1] < ours[1][1] and bool(different) == (name in UNSAID) and not wrong
    what = [f"routes differ in {', '.join(different)}"] * bool(different) + [wrong] * bool(wrong)
    return fixtures.Verdict(right, ", ".join(what), *errors)


def converted_by_us(name: str, llama: LlamaCpp, folder: Path, theirs: Logits) -> str:
    """The errors of our conversion of a folder: llama.cpp must compute the same on it
    as on its own.
    """
    save_tokenizer(folder)
    try:
        logits = llama.logits(to_gguf(folder, folder.with_suffix(".gguf")))
    except UnsupportedModelError as error:
        return "" if name in REFUSED else f"we refuse it: {error}"
    if name in REFUSED:
        return "we convert it now"
    tolerance = ROUNDED_TOLERANCE if CASES[name].mxfp4 else TOLERANCE  # ours is in float32
    return (
        ""
        if logits is not None and relative_error(logits, theirs) < tolerance
        else "our file is another model to llama.cpp"
    )


def written(llama: LlamaCpp, scratch: Path) -> list[str]:
    """The differences between files that we and llama.cpp write; the formats of
    mixtures are kept.
    """
    ratios = block_errors.ratios(llama.python, environment(), scratch)
    for rows, by in ratios.items():
        print(
            f"{f'errors of {rows}':24} "
            f"{', '.join(f'{name} {ratio:.3f}' for name, ratio in by.items())}",
            flush=True,
        )
    found = {
        name: mixtures.find(model, llama.python, environment(), scratch)
        for name, model in mixtures.MODELS.items()
    }
    wrong = [f"{name}: {each}" for name, of in found.items() for each in mixtures.differences(of)]
    print(f"{'mixtures':24} {wrong or f'the same formats in {len(found)} models'}", flush=True)
    mixtures.keep(PACKAGE, found)
    return block_errors.too_large(ratios) + wrong


def verdict_of_type(name: str, llama: LlamaCpp, scratch: Path) -> fixtures.Verdict:
    """Judge a tensor type."""
    file = scratch / f"{name}.gguf"
    write(file, name)
    theirs = llama.logits(file)
    if theirs is None:
        return fixtures.Verdict(False, "not run")
    error = relative_error(our_logits(file, TOKENS, like_theirs=True)[0], theirs)
    return fixtures.Verdict(error < ROUNDED_TYPE_TOLERANCE, "", error, error)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"of {', '.join([*CASES, *TYPES])}"
    )
    parser.add_argument(
        "--python", help="an interpreter that has llama-cpp-python; else one is set up in .bench"
    )
    parser.add_argument(
        "--source",
        type=Path,
        help="llama.cpp's sources of that version; else they are downloaded to .bench",
    )
    args = parser.parse_args()
    if unknown := [name for name in args.cases if name not in CASES and name not in TYPES]:
        parser.error(f"unknown: {', '.join(unknown)}")
    transformers.utils.logging.set_verbosity_error()
    try:
        llama = LlamaCpp(checked(args.python or interpreter("llama.cpp")), args.source or sources())
    except (Unavailable, subprocess.CalledProcessError) as error:
        sys.exit(f"llama.cpp: {error}")
    found, wrong = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.cases or [*CASES, *TYPES]:
            found[name] = (verdict_of_type if name in TYPES else verdict)(
                name, llama, Path(scratch)
            )
            print(f"{name:24} {found[name]}", flush=True)
        if not args.cases and all(each.right for each in found.values()):
            fixtures.write(PACKAGE, {name: found[name] for name in CASES}, Path(scratch))
        if not args.cases:
            wrong = written(llama, Path(scratch))
    if wrong := [name for name, each in found.items() if not each.right] + wrong:
        sys.exit(f"not as expected: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
