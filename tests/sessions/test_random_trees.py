"""Random trees of sessions against plain decoding: every node, score and embedding is equal to the
bit, and kept paths hold exactly the blocks of their distinct tokens.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.request import RequestOptions
from headrace.sampling.sampler import derive_seed, token_logprobs
from headrace.sampling_params import SamplingParams
from headrace.sessions.session import Node
from tests.engine.toy import VOCAB, plain_decoding, toy_engine, toy_logits, toy_vector
from tests.random_trees import RandomTrees
from tests.sessions.bare import BareHost, num_block_ends

MAX_MODEL_LEN = 40
NUM_TREES = 500
TREES_PER_TEST = 50


class RandomSession:
    """A session that random calls change, beside ordinary requests, with each result checked."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.truth: dict[tuple[int, int], list[int]] = {}
        self.windows = rng.choice([(0,), (0,), (0, 5), (0, 2), (4,)])
        drafts = RandomTrees(seed, VOCAB, self.truth, max_nodes=rng.choice([0, 6]))
        block_size = rng.choice([1, 3, 4]) if self.windows == (0,) else 4
        engine = toy_engine(
            num_blocks=-(-MAX_MODEL_LEN // block_size) + rng.choice([0, 3, 10, 200]),
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            proposer=drafts,
            windows=self.windows,
            max_num_seqs=rng.choice([2, 4, 16]),
            max_num_batched_tokens=rng.choice([5, 16, 64]),
            chunked_prefill_size=rng.choice([0, 3]),
            multi_step_ms=rng.choice([0, 1e6]),
            late=rng.random() < 0.3,
        )
        self.host = BareHost(engine, self.disturb)
        self.num_disturbed = 0
        self.nodes: list[Node] = []
        self.session = self.host.session(self.tokens(9), seed=seed)
        self.nodes = [self.session.root]

    def tokens(self, most: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, most))]

    def disturb(self, host: BareHost) -> None:
        """Add an ordinary request, with or without a path's first tokens, or park a path."""
        rng, kept = self.rng, host.engine._scheduler.kept
        if rng.random() < 0.02 and kept:
            kept.park()
        if rng.random() < 0.05 and self.num_disturbed < 60 and self.nodes:
            self.num_disturbed += 1
            prompt = rng.choice(self.nodes).token_ids[:20] + self.tokens(3)
            params = SamplingParams(max_tokens=rng.randint(1, 12), seed=rng.randrange(99))
            options = RequestOptions(priority=rng.choice([-1, 0, 0]))
            host.engine.add_request(prompt, params, options)

    def params(self) -> SamplingParams:
        rng = self.rng
        return SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.3]),
            top_k=rng.choice([0, 5]),
            presence_penalty=rng.choice([0.0, 1.0]),
            max_tokens=rng.randint(1, 6),
            seed=rng.choice([None, None, 7]),
            logprobs=rng.choice([None, 0]),
        )

    def sample(self, node: Node) -> None:
        k, params = self.rng.choice([1, 1, 2, 3, 4]), self.params()
        if node.num_tokens >= MAX_MODEL_LEN:
            with pytest.raises(RequestError, match="max_model_len"):
                node.sample(k, params)
            return
        base = self.session.seed if params.seed is None else params.seed
        first = self.session._num_children[node.name]
        number = self.next_number()
        expected = []
        for child in range(k):
            seed = derive_seed(base, f"{node.name}.{first + child}")
            alone = replace(params, seed=seed)
            expected.append(plain_decoding(node.token_ids, alone, 0, MAX_MODEL_LEN))
            self.truth[number, child] = expected[-1]  # which the proposer drafts
        children = node.sample(k, params)
        assert [child.token_ids for child in children] == expected
        for child in children:
            assert child.output is not None
            if params.logprobs is not None:
                assert child.output.logprobs is not None
                found = [
                    entry[token].logprob
                    for token, entry in zip(child.own_token_ids, child.output.logprobs, strict=True)
                ]
                assert found == self.logprobs(node, list(child.own_token_ids))
        self.nodes += children

    def next_number(self) -> int:
        """The number of the engine's next request."""
        numbers = self.host.engine._numbers
        number = next(numbers)
        self.host.engine._numbers = type(numbers)(number)
        return number

    def logprobs(self, node: Node, continuation: list[int]) -> list[float]:
        path = node.token_ids
        return [
            token_logprobs(toy_logits(path + continuation[:i]), token, 0).logprob
            for i, token in enumerate(continuation)
        ]

    def score(self, node: Node) -> None:
        space = MAX_MODEL_LEN - node.num_tokens
        if space < 4:
            return
        texts = [self.tokens(min(space, 6)) for _ in range(self.rng.choice([1, 2, 5]))]
        scores = node.score(texts)
        assert [score.token_ids for score in scores] == texts
        assert [score.logprobs for score in scores] == [self.logprobs(node, text) for text in texts]

    def embed(self, node: Node) -> None:
        how: Any = self.rng.choice(["last", "mean", "cls"])
        assert node.embed(how).tobytes() == toy_vector(node.token_ids, how).tobytes()

    def extend(self, node: Node) -> None:
        if node.num_tokens < MAX_MODEL_LEN - 5:
            self.nodes.append(node.extend(self.tokens(4)))

    def rollback(self, node: Node) -> None:
        if node.parent is None:
            return
        path = node.token_ids
        to = self.rng.randint(self.session.root.num_tokens, node.num_tokens)
        back = node.rollback(to)
        assert back.token_ids == path[:to]
        if back not in self.nodes:
            self.nodes.append(back)

    def close(self, node: Node) -> None:
        if node.parent is not None:
            node.close()
            assert not node.is_open

    def fork(self, node: Node) -> None:
        self.nodes += node.fork(2)

    def act(self) -> None:
        node = self.rng.choice(self.nodes)
        actions = [self.sample] * 5 + [self.extend, self.extend, self.score, self.embed]
        actions += [self.fork, self.rollback, self.close]
        if node.name.count(".") < 12:
            self.rng.choice(actions)(node)
        self.nodes = [node for node in self.nodes if node.is_open]
        assert len(self.nodes) == self.session.num_nodes
        self.check_kept()

    def check_kept(self) -> None:
        engine = self.host.engine
        executable: Any = engine._loop.executable
        self.host.check_blocks()
        kept = self.host.kept(self.nodes)
        assert len(kept) == engine.stats().kept_paths
        for node, tokens in kept.items():
            path = engine._scheduler.kept._paths[f"{self.session.id}/{node.name}"]
            executable.check(engine._kv, path.tables, tokens)
        if self.windows == (0,):
            ends = num_block_ends(kept.values(), engine._kv.block_size)
            assert engine.stats().kept_blocks == ends
            assert engine._kv.pools[0].num_free == engine._kv.pools[0].num_blocks - ends


@pytest.mark.parametrize("first", range(0, NUM_TREES, TREES_PER_TEST))
def test_random_trees_equal_plain_requests(first: int) -> None:
    for seed in range(first, first + TREES_PER_TEST):
        tree = RandomSession(seed)
        for _ in range(25):
            tree.act()
        tree.session.close()
        stats = tree.host.engine.stats()
        assert stats.kept_paths == stats.kept_blocks == 0
        assert stats.blocks_free == stats.blocks_total and not stats.failed_steps
