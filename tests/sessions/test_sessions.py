"""Sessions of `LLM` and `AsyncLLM`: nodes, scores, limits, salts and memory."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.errors import ClosedError, RequestError, RequestFailedError
from headrace.request import PathOptions, RequestOptions
from headrace.sessions.session import Node, Session
from headrace.structured_outputs import StructuredOutputs
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture
from tests.engine.toy import toy_engine
from tests.sessions.bare import BareHost, num_block_ends
from tests.test_adapters import write_adapter
from tests.test_llm import clean, model, until  # noqa: F401 - a fixture

PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9] * 9}
SAMPLED = SamplingParams(temperature=1, max_tokens=9, ignore_eos=True, logprobs=0)
OPTIONS: dict[str, Any] = {"max_model_len": 128, "kv_blocks": 64, "threads": 1, "backend": "cpu"}


@pytest.fixture
def llm(model: str) -> Iterator[LLM]:  # noqa: F811
    with LLM(model, **OPTIONS) as llm:
        yield llm


def replayed(llm: LLM, node: Any, params: SamplingParams) -> Any:
    """The result of a plain request with the path and the seed of a sampled node."""
    prompt = {"prompt_token_ids": node.parent.token_ids}
    (result,) = llm.generate([prompt], replace(params, n=1, seed=node.seed))
    return result.outputs[0]


def check_replay(llm: LLM, node: Any, params: SamplingParams) -> None:
    assert replace(node.output, index=0) == replayed(llm, node, params)


class TestNodes:
    def test_children_equal_plain_requests(self, llm: LLM) -> None:
        with llm.session(PROMPT, seed=3) as session:
            children = session.root.sample(4, SAMPLED)
            assert [child.name for child in children] == ["0.0", "0.1", "0.2", "0.3"]
            assert len({child.own_token_ids for child in children}) == 4
            for child in children:
                check_replay(llm, child, SAMPLED)
            (grandchild,) = children[2].extend("hello").sample(1, SAMPLED)
            check_replay(llm, grandchild, SAMPLED)
            assert grandchild.parent and grandchild.parent.text == "hello"

    def test_names_decide_the_draws(self, llm: LLM) -> None:
        def texts(order: list[int]) -> list[tuple[int, ...]]:
            with llm.session(PROMPT, seed=3) as session:
                forks = session.root.fork(2)
                found = {i: forks[i].sample(2, SAMPLED) for i in order}
                found[2] = forks[0].sample(1, SAMPLED)
                return [node.own_token_ids for i in range(3) for node in found[i]]

        assert texts([0, 1]) == texts([1, 0]) and len(set(texts([0, 1]))) == 5

    def test_seeds(self, llm: LLM) -> None:
        with llm.session(PROMPT, seed=3) as a, llm.session(PROMPT, seed=4) as b:
            assert a.root.sample(1, SAMPLED)[0].seed != b.root.sample(1, SAMPLED)[0].seed
            chosen = replace(SAMPLED, seed=9)
            assert a.root.sample(1, chosen)[0].seed == b.root.sample(1, chosen)[0].seed
        with llm.session(PROMPT) as a, llm.session(PROMPT) as b:
            assert a.seed != b.seed

    def test_options_apply_per_call(self, llm: LLM) -> None:
        with llm.session(PROMPT) as session:
            wanted = StructuredOutputs(choice=["hello", "he"])
            params = SamplingParams(structured_outputs=wanted, max_tokens=20)
            for node in session.root.sample(3, params):
                assert node.text in ("hello", "he")
                check_replay(llm, node, params)
            beams = session.root.sample(2, SamplingParams(beam_width=3, max_tokens=5))
            (expected,) = llm.generate([PROMPT], SamplingParams(beam_width=3, n=2, max_tokens=5))
            assert [beam.output for beam in beams] == expected.outputs
            assert [beam.seed for beam in beams] == [None, None]
            ends = SamplingParams(max_tokens=9, stop_token_ids=list(range(3, 67)), seed=1)
            biased = replace(ends, logit_bias={40: 100.0})
            (stopped,) = session.root.sample(1, biased)
            assert stopped.own_token_ids == (40,)
            assert stopped.output and stopped.output.finish_reason == "stop"
            (late,) = session.root.sample(1, SAMPLED, timeout=0)
            assert late.output and late.output.finish_reason == "timeout"
            assert llm.stats().kept_paths == 5  # no beam, and no node after a timeout

    def test_items_in_a_session(self, llm: LLM) -> None:
        items = ["hello", "he w", [9, 9, 9]]
        wanted = StructuredOutputs(allowed_sequences=items)
        params = SamplingParams(structured_outputs=wanted, ignore_eos=True, max_tokens=20)
        with llm.session(PROMPT, seed=1) as session:
            nodes = session.root.sample(4, params)
            for node in nodes:
                assert node.text in items or node.own_token_ids == (9, 9, 9)
                check_replay(llm, node, params)
            beams = session.root.sample(3, replace(params, beam_width=3))
            assert len({beam.own_token_ids for beam in beams}) == 3

    def test_scores_equal_prompt_logprobs(self, llm: LLM) -> None:
        texts = ["hello", "w", "hello w hello", [9, 9, 9, 9]]
        with llm.session(PROMPT) as session:
            (node,) = session.root.sample(1, SAMPLED)
            scores = node.score(texts)
            for text, score in zip(texts, scores, strict=True):
                path = node.token_ids + session.read(text)
                (plain,) = llm.generate(
                    [{"prompt_token_ids": path}], SamplingParams(max_tokens=1, prompt_logprobs=0)
                )
                entries = (plain.prompt_logprobs or [])[-len(score.logprobs) :]
                pairs = zip(entries, score.token_ids, strict=True)
                assert score.logprobs == [entry[i].logprob for entry, i in pairs if entry]
                assert score.total == pytest.approx(sum(score.logprobs))
                assert score.mean == score.total / len(score.token_ids)
            assert node.output and session.root.score([node.own_token_ids])[0].total == (
                node.output.cumulative_logprob
            )
            assert session.score([node, session.root], [["w"], []]) == [[scores[1]], []]

    def test_embed(self, llm: LLM) -> None:
        with llm.session(PROMPT) as session:
            node = session.root.extend("hello")
            for pooling in ("last", "mean", "cls"):
                (expected,) = llm.embed({"prompt_token_ids": node.token_ids}, pooling)
                assert np.array_equal(node.embed(pooling), expected)
            assert np.linalg.norm(node.embed(normalise=True)) == pytest.approx(1)

    def test_rollback(self, llm: LLM) -> None:
        with llm.session(PROMPT) as session:
            root, size = session.root, session.root.num_tokens
            (node,) = root.extend("hello").sample(1, SAMPLED)
            path = node.token_ids
            back = node.rollback(size + 3)
            assert back.token_ids == path[: size + 3] and not node.is_open and back.is_open
            (again,) = back.sample(1, SAMPLED)
            check_replay(llm, again, SAMPLED)
            assert again.rollback(root) is root and not again.is_open and back.is_open
            assert back.rollback(back.num_tokens).token_ids == back.token_ids

    def test_a_conversation_starts_a_session(self, llm: LLM) -> None:
        messages = [{"role": "user", "content": "hello"}]
        with llm.session(messages) as session:
            assert session.root.token_ids == llm.apply_chat_template(messages)

    def test_adapters(self, llm: LLM, tmp_path: Path) -> None:
        folder = write_adapter(tmp_path / "adapter", 4, layers=(0, 1), heads=64, dim=64)
        llm.load_adapter("a", folder)
        with llm.session(PROMPT, seed=3) as plain, llm.session(PROMPT, adapter="a") as adapted:
            (node,) = plain.root.sample(1, SAMPLED, adapter="a")
            prompt = {"prompt_token_ids": plain.root.token_ids}
            params = replace(SAMPLED, seed=node.seed)
            (expected,) = llm.generate([prompt], params, adapter="a")
            assert node.output == expected.outputs[0] != replayed(llm, node, SAMPLED)
            scores = [root.score(["hello", "w"]) for root in (plain.root, adapted.root)]
            assert scores[1] == plain.root.score(["hello", "w"], adapter="a") != scores[0]
        with pytest.raises(RequestError, match="unknown adapter"):
            llm.session(PROMPT, adapter="b")


class TestErrors:
    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda node: node.sample(0), "k must be a whole number from 1"),
            (lambda node: node.sample(2, SamplingParams(n=3)), "n is 3, but k is 2"),
            (lambda node: node.sample(1, "hot"), "params must be SamplingParams"),
            (lambda node: node.sample(1, adapter="no"), "adapter"),
            (lambda node: node.score("hello"), "continuations must be a list"),
            (lambda node: node.score([""]), "empty"),
            (lambda node: node.score([[]]), "the continuation is empty"),
            (lambda node: node.extend([-1]), "continuation"),
            (lambda node: node.extend([10**6]).sample(1), "vocabulary ends at"),
            (lambda node: node.extend([5] * 99).sample(1), "max_model_len"),
            (lambda node: node.fork(0), "n must be"),
            (lambda node: node.fork(5), "max_nodes 4"),
            (lambda node: node.sample(5), "max_nodes 4"),
            (lambda node: node.rollback(0), "to must be"),
            (lambda node: node.rollback(2), "the root of the session has 45 tokens"),
            (lambda node: node.extend("w").rollback(node.extend("w")), "is not above"),
            (lambda node: node.embed("max"), "pooling must be"),
        ],
    )
    def test_bad_calls(self, llm: LLM, call: Callable[[Node], object], message: str) -> None:
        with llm.session(PROMPT, max_nodes=4) as session:
            with pytest.raises(RequestError, match=message):
                call(session.root)
            session.root.fork(1)  # the session goes on

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"seed": -1}, "seed must be"),
            ({"max_nodes": 0}, "max_nodes must be"),
            ({"cache_salt": 3}, "cache_salt must be"),
        ],
    )
    def test_bad_options(self, llm: LLM, options: dict[str, Any], message: str) -> None:
        with pytest.raises(RequestError, match=message):
            llm.session(PROMPT, **options)
        assert llm.stats().kept_paths == 0

    @pytest.mark.parametrize(
        ("options", "name"),
        [({"prefix_cache": False}, "prefix_cache"), ({"batching": "static"}, "batching")],
    )
    def test_what_a_session_needs(self, options: dict[str, Any], name: str) -> None:
        host = BareHost(toy_engine(**options))
        with pytest.raises(RequestError, match=f"a session needs {name}"):
            host.session([1, 2, 3])

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ({"keep": ["a", "b"]}, "2 names for 1 outputs"),
            ({"keep": [""]}, "path.keep must be names"),
            ({"seeds": [1, 2]}, "2 seeds for 1 outputs"),
            ({"seeds": [-1]}, "path.seeds must be"),
            ({"score_from": 0}, "path.score_from must be"),
            ({"score_from": 4}, "path.score_from must be"),
        ],
    )
    def test_bad_path_options(self, path: dict[str, Any], message: str) -> None:
        with pytest.raises(RequestError, match=message):
            toy_engine().add_request([1, 2, 3], options=RequestOptions(path=PathOptions(**path)))

    def test_closed_nodes_and_sessions(self, llm: LLM) -> None:
        with llm.session(PROMPT) as session, llm.session(PROMPT) as other:
            child = session.root.extend("w")
            grandchild = child.extend("w")
            child.close()
            child.close()
            nodes = (session.root, child, grandchild)
            assert [node.is_open for node in nodes] == [True, False, False]
            with pytest.raises(RequestError, match=r"node 0\.0 is closed"):
                child.sample(1)
            with pytest.raises(RequestError, match="another session"):
                session.sample([other.root])
        with pytest.raises(ClosedError, match="the session is closed"):
            session.root.sample(1)
        session.close()
        assert clean(llm)

    def test_closed_engine(self, model: str) -> None:  # noqa: F811
        llm = LLM(model, **OPTIONS)
        session = llm.session(PROMPT)
        llm.close()
        with pytest.raises(ClosedError):
            session.root.sample(1)
        session.close()


class TestMemory:
    def test_a_forgotten_session_ends(self, llm: LLM) -> None:
        session = llm.session(PROMPT)
        nodes = session.root.sample(3, SAMPLED)
        assert llm.stats().kept_paths == 4
        del session, nodes
        gc.collect()
        assert llm.stats().kept_paths == 0 and clean(llm)

    def test_a_child_shares_the_block_in_which_its_parent_ends(self, llm: LLM) -> None:
        with llm.session(PROMPT) as session:
            assert llm.stats().kept_blocks == 2  # 44 tokens in blocks of 32
            (child,) = session.root.sample(1, SAMPLED)
            assert llm.stats().kept_blocks == 2
            (result,) = llm.generate([{"prompt_token_ids": child.token_ids}], SAMPLED)
            assert result.cached_tokens == 53  # of 54: the last drawn token has no KV
            session.root.sample(2, SAMPLED)
            assert llm.stats().kept_blocks == 4

    def test_nothing_crosses_salts(self, llm: LLM) -> None:
        with llm.session(PROMPT, cache_salt="a"):
            cached = [
                llm.generate([PROMPT], SAMPLED, cache_salt=salt)[0].cached_tokens
                for salt in ("a", "b", None)
            ]
            assert cached == [44, 0, 0]

    def test_requests_park_paths(self, model: str) -> None:  # noqa: F811
        with LLM(model, **OPTIONS | {"kv_blocks": 4}) as llm, llm.session(PROMPT) as session:
            nodes = session.root.sample(2, SAMPLED)
            llm.generate([{"prompt_token_ids": list(range(100))}], SAMPLED)  # takes all blocks
            assert llm.stats().kept_paths == 0
            for node in nodes:
                (child,) = node.sample(1, SAMPLED)
                check_replay(llm, child, SAMPLED)

    def test_kept_paths_take_at_most_half_of_the_blocks(self) -> None:
        host = BareHost(toy_engine(num_blocks=20))
        with host.session([1, 2, 3], seed=1) as session:
            for _ in range(30):
                session.root.sample(1, SamplingParams(max_tokens=9))
                stats = host.engine.stats()
                assert stats.kept_blocks <= 10 and stats.blocks_free >= 10
            assert stats.kept_paths < 31

    def test_a_large_tree_in_bounded_memory(self) -> None:
        """10,000 nodes of one token each, on a pool for 400 tokens."""
        host = BareHost(toy_engine(num_blocks=100))
        params = SamplingParams(max_tokens=1, temperature=1)
        with host.session([1, 2, 3], seed=1) as session:
            level = [session.root]
            while session.num_nodes < 10_000:
                k = min(4, 10_000 - session.num_nodes)
                level = [*level[1:], *level[0].sample(k, params)]
            with pytest.raises(RequestError, match="max_nodes 10,000"):
                level[0].fork(1)
            stats = host.engine.stats()
            kept = host.kept([session.root, *level])
            assert stats.kept_blocks <= 50 and kept
            assert stats.kept_blocks == num_block_ends(kept.values(), 4)
        assert host.engine.stats().kept_paths == 0 and not host.engine._scheduler.kept._edges


class TestAsyncLLM:
    def run(self, model: str, work: Callable[[AsyncLLM], Any]) -> Any:  # noqa: F811
        async def run() -> Any:
            async with await asyncio.to_thread(AsyncLLM, model, **OPTIONS) as llm:
                return await work(llm)

        return asyncio.run(asyncio.wait_for(run(), 60))

    def test_concurrent_nodes_equal_those_of_llm(self, model: str) -> None:  # noqa: F811
        def tree(session: Session) -> list[Any]:
            first = session.root.sample(3, SAMPLED)
            second = [child.sample(2, SAMPLED) for child in first]
            scores = [child.score(["hello", "w"]) for child in first]
            return [[node.output for nodes in second for node in nodes], scores]

        async def work(llm: AsyncLLM) -> list[Any]:
            async with await llm.session(PROMPT, seed=3) as session:
                first = await session.root.sample(3, SAMPLED)
                second = await asyncio.gather(*(child.sample(2, SAMPLED) for child in first))
                scores = await asyncio.gather(*(child.score(["hello", "w"]) for child in first))
                vector = await session.root.embed()
                assert vector.shape == (llm.spec.dim,)
                found = [[node.output for nodes in second for node in nodes], scores]
            assert await asyncio.to_thread(clean, llm)
            return found

        with LLM(model, **OPTIONS) as llm, llm.session(PROMPT, seed=3) as session:
            assert self.run(model, work) == tree(session)

    def test_cancelled_calls_leave_nothing(self, model: str) -> None:  # noqa: F811
        async def work(llm: AsyncLLM) -> None:
            session = await llm.session(PROMPT)
            long = replace(SAMPLED, max_tokens=80)
            calls = [
                asyncio.create_task(session.root.sample(4, long)),
                asyncio.create_task(session.root.score(["hello"] * 9)),
            ]
            await asyncio.sleep(0.001)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            session.close()
            await asyncio.to_thread(until, lambda: clean(llm))  # type: ignore[arg-type]

        self.run(model, work)

    def test_errors_reach_the_caller(self, model: str) -> None:  # noqa: F811
        async def work(llm: AsyncLLM) -> None:
            async with await llm.session(PROMPT) as session:
                with pytest.raises(RequestError, match="empty"):
                    await session.root.score(["w", ""])
                with pytest.raises(RequestFailedError, match="timed out"):
                    await session.root.score(["w"], timeout=0)

        self.run(model, work)
