"""A window in a model that was trained without: loss on a long text with and without sinks, and
bytes of KV.

Loss is the mean negative log-likelihood of tokens after twice the window in one long text.
"""

import numpy as np
from bench import Bench, say
from kv_formats import TEXT

from headrace import LLM, SamplingParams


def windows(bench: Bench) -> None:
    window, max_tokens = (32, 160) if bench.quick else (512, 6000)
    rows = []
    for name, options in {
        "all": {},
        f"first 4 and last {window:,}": {"attention_window": window},
        f"last {window:,}": {"attention_window": window, "attention_sinks": 0},
    }.items():
        say(name)
        with LLM(bench.model, threads=bench.threads, max_num_seqs=1, **options) as llm:
            ids = llm.get_tokenizer().encode(TEXT.read_text())[:max_tokens]
            (result,) = llm.generate(
                [{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, prompt_logprobs=0)
            )
            (kv,) = llm.stats().kv
        scores = [
            -scored[token].logprob
            for token, scored in zip(ids, result.prompt_logprobs or [], strict=True)
            if scored
        ]
        loss, nbytes = float(np.mean(scores[2 * window :])), kv.blocks_total * kv.block_bytes
        rows.append(
            (
                {"seen": name, "nll": loss, "kv_bytes": nbytes},
                [name, f"{loss:.3f}", f"{nbytes / 1e6:,.1f}"],
            )
        )
    say("")
    title = f"Windows: tokens {2 * window:,} to {len(ids):,} of a text"
    bench.table("windows", title, ["visible tokens", ">mean NLL", ">MB of KV per sequence"], rows)
