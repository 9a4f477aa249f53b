"""Early exits of a model: layers saved at each bound, and how often the bound fails on other text.

    python benchmarks/early_exit.py smollm2 --tokens 16384

Half of the text's pieces fit the maps. The others are split in halves 20 times: one half chooses
the exit, the other measures it.
"""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np

from headrace.convert.texts import calibration_pieces
from headrace.loader.backend_choice import with_backend
from headrace.loader.load import open_files
from headrace.loader.options import engine_config
from headrace.measure.early_exit import ExitReader, choose_exit, exit_on, split_pieces
from headrace.measure.progress import ignore_progress

_SPLITS = 20
_LENGTH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--bounds", type=float, nargs="+", default=[0.01, 0.05, 0.1])
    parser.add_argument("--error-probability", type=float, default=0.05)
    args = parser.parse_args()

    checkpoint = open_files(args.model, engine_config({}))
    config = with_backend(engine_config({}), checkpoint)
    num_layers = checkpoint.spec.num_layers
    pieces = calibration_pieces(checkpoint, args.text, _LENGTH, args.tokens)
    order = np.random.default_rng(0).permutation(len(pieces))
    fitting, pieces = split_pieces(pieces, order)
    reader = ExitReader(config, checkpoint, _LENGTH)
    maps = reader.fit(fitting, ignore_progress)
    rows = reader.read(pieces, maps, ignore_progress)
    reader.close()
    piece_of = rows[reader.depths[0]].piece
    print(
        f"{args.model}, {num_layers} layers: {sum(map(len, fitting)):,} tokens fit the maps, "
        f"{len(piece_of):,} in {len(pieces)} pieces choose and measure"
    )
    for depth, each in rows.items():
        print(f"first {depth} layers: {each.agrees.mean():.1%} agree with all layers")

    heading = (
        "| bound | exit after | tokens that leave | layers saved | disagreement | fails | KL |"
    )
    print(heading, "|---|---|---|---|---|---|---|", sep="\n")
    for bound in args.bounds:
        measured = []
        for seed in range(_SPLITS):
            half = np.random.default_rng(seed).permutation(len(pieces)) % 2 == 0
            chosen = choose_exit(
                {depth: each.take(half[piece_of]) for depth, each in rows.items()},
                num_layers,
                bound,
                args.error_probability,
            )
            if chosen:
                other = rows[chosen.num_layers].take(~half[piece_of])
                measured.append(exit_on(other, chosen, num_layers))
        if not measured:
            print(f"| {bound:.0%} | none is safe | | | | | |")
            continue
        shares = [exit.disagreement for exit in measured]
        depths = Counter(exit.early_exit.num_layers for exit in measured)
        print(
            f"| {bound:.0%} "
            f"| {', '.join(f'{depth} ({count})' for depth, count in depths.most_common())} "
            f"| {np.mean([exit.exits for exit in measured]):.1%} "
            f"| {np.mean([exit.layers_saved for exit in measured]):.1%} "
            f"| {np.mean(shares):.2%} (max {max(shares):.2%}) "
            f"| {sum(share > bound for share in shares)} of {len(shares)} "
            f"| {np.mean([exit.kl for exit in measured]):.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
