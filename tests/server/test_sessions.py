"""Sessions over HTTP: results equal to `LLM`, limits, time to live, keys and restarts."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from tests.server.running import Reply, Running, running, until

PROMPT = [5, 6, 7, 8, 9] * 9
SAMPLED = {"temperature": 1, "top_p": 1, "max_tokens": 9, "ignore_eos": True}
PARAMS = SamplingParams(temperature=1, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def served(model: str) -> Iterator[Running]:
    flags = ("--max-num-seqs", "8", "--threads", "1", "--kv-blocks", "64", "--max-sessions", "3")
    yield from running(model, *flags)


def post(server: Running, path: str, status: int = 200, **body: Any) -> Any:
    reply: Reply = server.post(f"/v1/sessions{path}", body)
    assert reply.status == status, reply.body
    return reply.json if status == 200 else reply.json["error"]


def start(server: Running, **fields: Any) -> str:
    session: str = post(server, "", **{"prompt": PROMPT, "seed": 3, **fields})["id"]
    return session


def delete(server: Running, session: str, status: int = 200) -> None:
    assert server.request("DELETE", f"/v1/sessions/{session}").status == status


@pytest.fixture
def session(served: Running) -> Iterator[str]:
    session = start(served)
    yield session
    delete(served, session)


def kept_paths(server: Running) -> float:
    return server.figures()["headrace_kept_paths"]


class TestSessions:
    def test_nodes_equal_those_of_llm(self, served: Running, session: str, llm: LLM) -> None:
        here = {"session": session}
        with llm.session({"prompt_token_ids": PROMPT}, seed=3) as own:
            children = post(served, "/sample", **here, k=3, logprobs=True, **SAMPLED)["data"]
            expected = own.root.sample(3, replace(PARAMS, logprobs=0))
            for child, node in zip(children, expected, strict=True):
                assert (child["node"], child["parent"]) == (node.name, "0")
                assert child["token_ids"] == list(node.own_token_ids)
                assert child["text"] == node.text and child["finish_reason"] == "length"
                assert child["seed"] % 2**64 == node.seed
                assert len(child["logprobs"]) == 9
            texts: list[Any] = ["hello", "w", [9, 9]]
            scores = post(served, "/score", **here, node="0.1", continuations=texts)["data"]
            assert [tuple(score.values()) for score in scores] == [
                (score.token_ids, score.logprobs, score.total) for score in expected[1].score(texts)
            ]
            added = post(served, "/extend", **here, node="0.1", text="hello")
            assert added["token_ids"] == list(expected[1].extend("hello").own_token_ids)
            forks = post(served, "/fork", **here, node=added["node"], n=2)["data"]
            assert [fork["node"] for fork in forks] == ["0.1.0.0", "0.1.0.1"]
            back = post(served, "/rollback", **here, node="0.1.0.1", to=50)
            assert (back["num_tokens"], back["parent"]) == (50, "0")
            post(served, "/close", **here, node="0.1")
            error = post(served, "/sample", 400, **here, node="0.1.0.0", **SAMPLED)
            assert error["param"] == "node" and "no open node" in error["message"]

    def test_a_plain_request_repeats_a_node(self, served: Running, session: str) -> None:
        (child,) = post(served, "/sample", session=session, **SAMPLED)["data"]
        body = {"prompt": PROMPT, "seed": child["seed"], "return_token_ids": True, **SAMPLED}
        (choice,) = served.post("/v1/completions", body).json["choices"]
        assert choice["text"] == child["text"]

    def test_formats(self, served: Running, session: str) -> None:
        wanted = {"choice": ["hello", "he"]}
        (node,) = post(served, "/sample", session=session, structured_outputs=wanted, max_tokens=9)[
            "data"
        ]
        assert node["text"] in wanted["choice"]

    def test_a_conversation(self, served: Running) -> None:
        messages = [{"role": "user", "content": "hello"}]
        session = post(served, "", messages=messages)
        assert session["root"]["num_tokens"] == len(
            served.post("/tokenize", {"messages": messages}).json["tokens"]
        )
        delete(served, session["id"])

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/sample", {"k": 0}, "k"),
            ("/sample", {"stream": True}, "stream"),
            ("/sample", {"cache_salt": "a"}, "cache_salt"),
            ("/sample", {"temperature": -1}, "temperature"),
            ("/sample", {"node": "0.7"}, "node"),
            ("/score", {"continuations": []}, "continuations"),
            ("/score", {"continuations": [""]}, None),
            ("/score", {"continuations": [[10**6]]}, None),
            ("/extend", {"text": ""}, "text"),
            ("/extend", {"text": [7] * 5000}, "text"),
            ("/fork", {"n": 0}, "n"),
            ("/rollback", {"to": 3}, "to"),
            ("/close", {}, "node"),
        ],
    )
    def test_bad_fields(
        self, served: Running, session: str, path: str, body: dict[str, Any], param: str | None
    ) -> None:
        error = post(served, path, 400, session=session, **body)
        assert param is None or error["param"] == param, error

    def test_bad_starts(self, served: Running) -> None:
        for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}):
            assert "either prompt or messages" in post(served, "", 400, **body)["message"]
        assert post(served, "", 400, prompt="a", ttl=0)["param"] == "ttl"
        assert post(served, "", 404, prompt="a", model="no")["param"] == "model"
        assert post(served, "/sample", 404, session="no")["code"] == "session_not_found"
        delete(served, "no", 404)

    def test_limits(self, served: Running) -> None:
        sessions = [start(served, max_nodes=2) for _ in range(3)]
        error = post(served, "", 429, prompt="hello")
        assert error["code"] == "rate_limit_exceeded" and "3 open sessions" in error["message"]
        assert "max_nodes 2" in post(served, "/fork", 400, session=sessions[0], n=2)["message"]
        for session in sessions:
            delete(served, session)
            delete(served, session, 404)
        until(lambda: kept_paths(served) == 0)

    def test_a_forgotten_session_ends(self, served: Running) -> None:
        session = start(served, ttl=1)
        post(served, "/sample", session=session, k=2, **SAMPLED)
        time.sleep(2)
        until(lambda: kept_paths(served) == 0)
        assert post(served, "/extend", 404, session=session, text="w")["param"] == "session"

    def test_a_session_survives_the_engine(self, model: str) -> None:
        for server in running(model, "--threads", "1", "--kv-blocks", "64"):
            session = start(server)
            first = post(server, "/sample", session=session, k=2, **SAMPLED)["data"]
            os.kill(server.engine_pid, signal.SIGKILL)
            until(lambda server=server: server.get("/health").status == 503)  # type: ignore[misc]
            until(lambda server=server: server.get("/health").status == 200)  # type: ignore[misc]
            again = post(server, "/sample", session=session, k=1, **SAMPLED)["data"]
            assert again[0]["node"] == "0.2" and len(first) == 2
            scores = post(server, "/score", session=session, node="0.1", continuations=["w", "he"])
            assert len(scores["data"]) == 2

    def test_keys(self, model: str) -> None:
        for server in running(
            model, "--threads", "1", "--kv-blocks", "64", "--api-key", "a", "--api-key", "b"
        ):
            headers = [{"authorization": f"Bearer {key}"} for key in "ab"]
            body = {"prompt": PROMPT}
            session = server.post("/v1/sessions", body, headers=headers[0]).json["id"]
            for key, status in ((1, 404), (0, 200)):
                reply = server.post(
                    "/v1/sessions/sample", {"session": session}, headers=headers[key]
                )
                assert reply.status == status
                path = f"/v1/sessions/{session}"
                if key:
                    assert server.request("DELETE", path, headers=headers[key]).status == 404

    def test_soak(self, served: Running) -> None:
        """Sessions that are deleted, that end by time, and whose clients leave: nothing stays."""

        def one(number: int) -> None:
            reply = served.post("/v1/sessions", {"prompt": PROMPT[number % 9 :], "ttl": 1})
            if reply.status == 429:
                return
            session = reply.json["id"]
            for _ in range(3):
                body = {"session": session, "k": 2, **SAMPLED}
                served.post("/v1/sessions/sample", body)
            if number % 3 == 0:
                delete(served, session)
            elif number % 3 == 1:
                body = {"session": session, "k": 8, "max_tokens": 3000, "ignore_eos": True}
                served.open_stream("/v1/sessions/sample", body).close()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(one, range(24)))
        until(lambda: served.at_rest() and not kept_paths(served))
