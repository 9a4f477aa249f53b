"""Random trees of sessions on the CPU kernels, in each KV format: nodes and scores equal plain
requests to the bit.
"""

import random
from dataclasses import replace

import pytest

from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from tests.sessions.bare import BareHost
from tests.tiny import run_all, tiny_engine, tiny_model

VOCAB = 61


@pytest.mark.parametrize("kv_dtype", ["bf16", "f32", "int8", "int4", "k8v4"])
@pytest.mark.parametrize("window", [0, (0, 24)])
def test_nodes_equal_plain_requests(kv_dtype: str, window: int | tuple[int, ...]) -> None:
    rng = random.Random(f"{kv_dtype}{window}")
    model = tiny_model(5, window=window, context=256)
    options = {"kv_dtype": kv_dtype, "proposer": "suffix", "max_num_batched_tokens": 64}
    plain = tiny_engine(model, "cpu", slots=1024, prefix_cache=False, kv_dtype=kv_dtype)
    num_drafted = 0
    for seed in range(4):
        engine = tiny_engine(model, "cpu", slots=rng.choice([320, 640]), **options)
        host = BareHost(engine)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 70))]
        with host.session(prompt, seed=seed) as session:
            nodes = [session.root]
            for _ in range(8):
                node = rng.choice(nodes)
                params = SamplingParams(
                    temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(1, 20), logprobs=0
                )
                children = node.sample(rng.randint(1, 3), params)
                requests = [(node.token_ids, replace(params, seed=c.seed)) for c in children]
                expected = [result.outputs[0] for result in run_all(plain, requests)]
                assert [replace(c.output, index=0) for c in children if c.output] == expected

                texts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))] for _ in "abc"]
                scores = node.score(texts)
                scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
                requests = [(node.token_ids + text, scored) for text in texts]
                for score, result in zip(scores, run_all(plain, requests), strict=True):
                    entries = (result.prompt_logprobs or [])[node.num_tokens :]
                    pairs = zip(entries, score.token_ids, strict=True)
                    assert score.logprobs == [
                        entry[token].logprob for entry, token in pairs if entry
                    ]

                if rng.random() < 0.3:  # an ordinary request goes on from a node's text
                    engine.add_request(
                        node.token_ids[:50], SamplingParams(max_tokens=30), RequestOptions()
                    )
                nodes += [child for child in children if child.num_tokens < 200]
                nodes.append(rng.choice(nodes).extend([rng.randrange(VOCAB)]))
                if len(nodes) > 6:
                    back = nodes.pop(-2)
                    if back.parent is not None and back.num_tokens > len(prompt):
                        nodes = [*nodes, back.rollback(back.num_tokens - 1)]
                    nodes = [node for node in nodes if node.is_open]
        stats = engine.stats()
        assert stats.blocks_free == stats.blocks_total and not stats.failed_steps
        num_drafted += stats.drafted
    assert num_drafted
