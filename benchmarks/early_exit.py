"""Early exits of a model: layers saved at each bound, and how often the bound fails on other text.

    python benchmarks/early_exit.py smollm2

As in `headrace calibrate --early-exit`, a quarter of the text's pieces fits the maps and a
sixteenth chooses the exit. The windows of all other pieces are drawn at random 20 times: half of
them tests thresholds, and the others measure the result. So do the topics of Python's language
reference that the text leaves out.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace.cli.progress import progress_bar
from headrace.convert.texts import calibration_pieces, read_text, text_pieces
from headrace.loader.backend_choice import with_backend
from headrace.loader.load import open_files
from headrace.loader.options import engine_config
from headrace.measure.early_exit import (
    Exit,
    choose_depth,
    choosing_limit,
    exit_on,
    least_margin,
    split_pieces,
)
from headrace.measure.exit_reader import PIECE, WINDOW, ExitReader, ExitRows, windows_in
from headrace.model.spec import EarlyExit

_SPLITS = 20


def main() -> None:
    args = _arguments()
    checkpoint = open_files(args.model, engine_config({}))
    config = with_backend(engine_config({"threads": args.threads}), checkpoint)
    num_layers = checkpoint.spec.num_layers
    pieces = calibration_pieces(checkpoint, args.text, PIECE, args.tokens)
    parts = split_pieces(pieces, np.random.default_rng(0))
    tokenizer, unread = checkpoint.load_tokenizer(), read_text(None, "evaluation")
    topics = text_pieces(tokenizer, unread, PIECE, args.tokens, "the language reference")
    topics, others = topics[: args.topic_pieces], parts.others[: args.pieces]
    num_testing = sum(map(windows_in, others)) // 2
    limits = {
        bound: choosing_limit(num_testing, bound, args.error_probability) for bound in args.bounds
    }
    with progress_bar() as on_progress:
        reader = ExitReader(config, checkpoint, PIECE)
        maps = reader.fit(parts.fitting, on_progress)
        choosing = reader.read(parts.choosing, maps, on_progress, "choosing exits")
        depths = {
            bound: choose_depth(choosing, num_layers, limit) for bound, limit in limits.items()
        }
        used = {depth: maps[depth] for depth in depths.values() if depth is not None}
        rows = reader.read(others, used, on_progress, "testing thresholds")
        elsewhere = reader.read(topics, used, on_progress, "other topics")
        reader.close()
    print(f"{len(parts.fitting)} pieces fit the maps, {len(parts.choosing)} choose the exit")
    for depth, each in choosing.items():
        print(f"first {depth} layers: {each.agrees.mean():.1%} agree with all layers")
    print_table(depths, num_layers, rows, elsewhere, args.error_probability)


def print_table(
    depths: Mapping[float, int | None],
    num_layers: int,
    rows: Mapping[int, ExitRows],
    elsewhere: Mapping[int, ExitRows],
    error_probability: float,
) -> None:
    """Test thresholds on random halves of the windows, and print what the exits do on others.

    `depths` by bound; `rows` of the text and `elsewhere`, on other topics, by depth.
    """
    num_windows = min(len(each.margin) for each in rows.values())
    num_testing = num_windows // 2
    num_topics = min(len(each.margin) for each in elsewhere.values())
    print(
        f"{num_testing:,} windows of {WINDOW} tokens test, {num_windows - num_testing:,} others "
        f"and {num_topics:,} of other topics measure, {_SPLITS} times"
    )
    print(
        "| bound | exit after | tokens that leave | layers saved | differ (max) | above | KL "
        "| other topics: differ (max) | above |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for bound, depth in depths.items():
        if depth is None:
            print(f"| {bound:.0%} | none is safe |")
            continue
        others, topics = [], []
        for seed in range(_SPLITS):
            tests = np.random.default_rng(seed).permutation(num_windows) < num_testing
            margin = least_margin(rows[depth].take(tests), bound, error_probability)
            if margin is not None:
                chosen = EarlyExit(depth, margin)
                others.append(exit_on(rows[depth].take(~tests), chosen, num_layers))
                topics.append(exit_on(elsewhere[depth], chosen, num_layers))
        if not others:
            print(f"| {bound:.0%} | {depth} of {num_layers} | none is safe |")
            continue
        print(
            f"| {bound:.0%} | {depth} of {num_layers} "
            f"| {np.mean([exit.exits for exit in others]):.1%} "
            f"| {np.mean([exit.layers_saved for exit in others]):.1%} "
            f"| {_differences(others, bound)} "
            f"| {np.mean([exit.kl for exit in others]):.4f} "
            f"| {_differences(topics, bound)} |",
            flush=True,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2**17)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--pieces", type=int, help="of the text that test and measure")
    parser.add_argument("--topic-pieces", type=int, help="of other topics that measure")
    parser.add_argument("--bounds", type=float, nargs="+", default=[0.01, 0.05, 0.1])
    parser.add_argument("--error-probability", type=float, default=0.05)
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args()


def _differences(exits: Sequence[Exit], bound: float) -> str:
    shares = [exit.disagreement for exit in exits]
    above = sum(share > bound for share in shares)
    return f"{np.mean(shares):.2%} ({max(shares):.2%}) | {above} of {len(shares)}"


if __name__ == "__main__":
    main()
