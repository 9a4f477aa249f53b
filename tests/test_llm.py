"""The offline face over a tiny model on disk, from file to text."""

import gc
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import LLM, SamplingParams
from headrace.config import EngineConfig, KvConfig
from headrace.errors import ClosedError, MemoryLimitError, ModelNotFoundError, NonFiniteLogitsError, RequestError, RequestFailedError
from headrace.llm import KvUse, engine_config, size_kv
from headrace.model import trace_model
from headrace.request import Service
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture
from tests.tiny import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def model(write_gguf: Any) -> str:  # noqa: F811
    path: Path = write_gguf()
    return str(path)


@pytest.fixture
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, backend="reference", max_model_len=64, kv_blocks=8) as llm:
        yield llm


def clean(llm: LLM) -> bool:
    """Whether nothing is left of past requests."""
    stats = llm.stats()
    return stats.blocks_free == stats.blocks_total and not (stats.running or stats.waiting or llm._inboxes or llm._engine.has_work)


class TestGenerate:
    def test_one_prompt(self, llm: LLM) -> None:
        (result,) = llm.generate("hello w", GREEDY)
        tokenizer = llm.get_tokenizer()
        assert result.prompt == "hello w"
        assert result.prompt_token_ids == tokenizer.encode("hello w")
        assert result.prompt_logprobs is None and result.finished and result.error is None
        (output,) = result.outputs
        assert (output.index, len(output.token_ids), output.finish_reason, output.stop_reason) == (0, 8, "length", None)
        assert output.text == tokenizer.decode(output.token_ids)
        assert (output.logprobs, output.cumulative_logprob) == (None, None)
        assert clean(llm)

    def test_beams_come_best_first_and_stream_in_one_piece(self, llm: LLM) -> None:
        params = SamplingParams(beam_width=3, n=3, max_tokens=6, ignore_eos=True)
        searched, plain = llm.generate(["hello w", "hello w"], [params, GREEDY])
        totals = [output.cumulative_logprob or 0.0 for output in searched.outputs]
        assert len({tuple(output.token_ids) for output in searched.outputs}) == 3
        assert totals == sorted(totals, reverse=True) and len(plain.outputs) == 1
        assert list(llm.stream("hello w", replace(params, n=1))) == [searched.outputs[0].text]
        assert clean(llm)

    def test_all_forms_of_prompts_in_order(self, llm: LLM) -> None:
        ids = llm.get_tokenizer().encode("hello")
        prompts = ["hello", {"prompt_token_ids": ids}, {"prompt": "hello"}, {"prompt": "as I say", "prompt_token_ids": ids}]
        results = llm.generate(prompts, GREEDY)
        assert [result.prompt for result in results] == ["hello", None, "hello", "as I say"]
        assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1
        assert llm.generate({"prompt_token_ids": ids}, GREEDY)[0].outputs == results[0].outputs

    def test_many_prompts_each_with_its_own_parameters(self, llm: LLM) -> None:
        prompts = [f"hello {i}" for i in range(20)]
        params = [replace(GREEDY, max_tokens=1 + i % 5) for i in range(20)]
        results = llm.generate(prompts, params)
        assert [result.prompt for result in results] == prompts
        assert [len(result.outputs[0].token_ids) for result in results] == [1 + i % 5 for i in range(20)]
        alone = [llm.generate(prompt, p)[0].outputs for prompt, p in zip(prompts, params, strict=True)]
        assert alone == [result.outputs for result in results]

    def test_defaults(self, llm: LLM) -> None:
        (result,) = llm.generate("hello")
        assert len(result.outputs[0].token_ids) <= 16
        assert llm.generate([]) == []

    def test_logprobs(self, llm: LLM) -> None:
        (result,) = llm.generate("hello w", replace(GREEDY, logprobs=2, prompt_logprobs=1))
        assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
        assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
        (output,) = result.outputs
        assert output.logprobs is not None
        for token, entry in zip(output.token_ids, output.logprobs, strict=True):
            assert next(iter(entry)) == token and entry[token].rank == 1 and len(entry) == 2
        assert output.cumulative_logprob == pytest.approx(sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True)))

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ("", "the prompt is empty"),
            ({"prompt_token_ids": []}, "the prompt is empty"),
            ({}, "the prompt is empty"),
            ({"prompt": 3}, "a prompt must be text, not int"),
            (7, "prompts must be text, a dictionary or a list of these, not int"),
            ([["hello"]], "a prompt must be text or a dictionary, not list"),
            ({"promt": "hello"}, "unknown key of a prompt 'promt'; did you mean prompt"),
            ({"prompt_token_ids": [100_000]}, "the vocabulary ends at"),
            ("x" * 64, "the prompt has 6[45] tokens, and the context of 64"),
            ("x" * 2_000_000, "the prompt has 2,000,000 bytes, more than a context of 64 tokens can hold"),
            ("\ud800", "surrogates"),
        ],
    )
    def test_a_bad_one_among_good_ones(self, llm: LLM, prompts: Any, message: str) -> None:
        bad = [] if isinstance(prompts, int) else prompts if isinstance(prompts, list) else [prompts]
        with pytest.raises(RequestError, match=message):
            llm.generate(["hello", *bad] if bad else prompts, GREEDY)
        assert llm.stats().steps == 0
        assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 8

    def test_service(self, llm: LLM) -> None:
        text = "hello " * 20
        both = [Service(cache_salt="a"), Service(cache_salt="b", timeout=0.0)]
        first, late = llm.generate([text, text], replace(GREEDY, max_tokens=2), service=both)
        assert (first.cached_tokens, first.outputs[0].finish_reason) == (0, "length")
        assert (late.outputs[0].finish_reason, late.outputs[0].token_ids) == ("timeout", [])
        assert not llm.generate(text, GREEDY, service=Service(cache_salt="b"))[0].cached_tokens
        again = llm.generate(text, GREEDY, service=Service(cache_salt="a"))[0]
        assert again.cached_tokens == (len(again.prompt_token_ids) - 1) // 32 * 32 > 0
        assert "".join(llm.stream(text, GREEDY, service=Service(cache_salt="a"))) == again.outputs[0].text
        with pytest.raises(RequestError, match="there are 1 prompts and 2 Service"):
            llm.generate("hello", GREEDY, service=both)
        assert clean(llm)

    def test_parameters_must_match_prompts(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="there are 1 prompts and 2 SamplingParams"):
            llm.generate(["hello"], [GREEDY, GREEDY])

    def test_a_failure_brings_all_results(self, model: str, write_gguf: Any) -> None:  # noqa: F811
        with LLM(model, backend="reference", max_model_len=64, multi_step_ms=0) as whole:
            expected = whole.generate("hello w", GREEDY)[0].outputs
            run = whole._engine._stepper.executable.run
            steps = iter(range(100))

            def spoiled(batch: Any) -> Any:
                rows = run(batch)
                if next(steps) == 3:
                    rows.logits[-1] = float("nan")
                return rows

            whole._engine._stepper.executable.run = spoiled  # type: ignore[method-assign]
            with pytest.raises(RequestFailedError, match="1 of 2 requests failed; prompt 1: the model produced") as error:
                whole.generate(["hello w", "hello"], GREEDY)
            good, bad = error.value.outputs
            assert good.outputs == expected
            assert isinstance(bad.error, NonFiniteLogitsError) and bad.outputs[0].finish_reason == "error"
            assert whole.generate("hello w", GREEDY)[0].outputs == expected
            assert clean(whole)

    def test_an_interrupt_leaves_nothing_behind(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        step, calls = llm._engine.step, iter(range(100))

        def interrupted() -> Any:
            if next(calls) == 1:
                raise KeyboardInterrupt
            return step()

        monkeypatch.setattr(llm._engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["hello", "w"], GREEDY)
        assert clean(llm)

    def test_progress(self, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
        assert llm.generate("hello", GREEDY, progress=True)[0].outputs == llm.generate("hello", GREEDY)[0].outputs


class TestChat:
    def test_renders_the_template(self, llm: LLM) -> None:
        (result,) = llm.chat(MESSAGES, GREEDY)
        assert result.prompt == "hello"
        assert result.prompt_token_ids == llm.get_tokenizer().encode("hello", add_special=False)

    def test_several_conversations(self, llm: LLM) -> None:
        results = llm.chat([MESSAGES, [*MESSAGES, {"role": "assistant", "content": " w"}]], GREEDY)
        assert [result.prompt for result in results] == ["hello", "hello w"]

    @pytest.mark.parametrize("messages", [[[]], ["hello"], [{"role": "user"}, 3]])
    def test_bad_conversations(self, llm: LLM, messages: Any) -> None:
        with pytest.raises(RequestError):
            llm.chat(messages, GREEDY)

    def test_no_template(self, write_gguf: Any) -> None:  # noqa: F811
        path = write_gguf({"tokenizer.chat_template": None})
        with LLM(str(path), backend="reference") as llm, pytest.raises(RequestError, match="no chat template"):
            llm.chat(MESSAGES)


class TestStream:
    def test_pieces_join_to_the_text(self, llm: LLM) -> None:
        expected = llm.generate("hello", GREEDY)[0].outputs[0].text
        assert "".join(llm.stream("hello", GREEDY)) == expected
        assert "".join(llm.stream(MESSAGES, GREEDY)) == llm.chat(MESSAGES, GREEDY)[0].outputs[0].text

    def test_closed_early(self, llm: LLM) -> None:
        pieces = llm.stream("hello", replace(GREEDY, max_tokens=50))
        next(pieces)
        assert llm.stats().running == 1
        pieces.close()  # type: ignore[attr-defined]
        assert clean(llm)

    def test_let_go(self, llm: LLM) -> None:
        next(llm.stream("hello", replace(GREEDY, max_tokens=50)))
        gc.collect()
        assert clean(llm)

    def test_never_read(self, llm: LLM) -> None:
        llm.stream("hello", GREEDY)
        assert clean(llm)

    def test_several_at_once(self, llm: LLM) -> None:
        expected = [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in ("hello", "w", "ll")]
        first, second = llm.stream("hello", GREEDY), llm.stream("w", GREEDY)
        texts = [next(first), next(second)]
        texts.append(llm.generate("ll", GREEDY)[0].outputs[0].text)
        texts[0] += "".join(first)
        texts[1] += "".join(second)
        assert texts == expected
        assert clean(llm)

    def test_refused_at_once(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="the prompt is empty"):
            llm.stream("", GREEDY)
        with pytest.raises(RequestError, match="n is 2"):
            llm.stream("hello", replace(GREEDY, n=2))


def test_several_threads(llm: LLM) -> None:
    prompts = ["hello", "w", "ll", "hell"]
    expected = [result.outputs for result in llm.generate(prompts, GREEDY)]
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        for _ in range(5):
            results[i] = llm.generate(prompts[i], GREEDY)[0].outputs

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(4)] == expected
    assert clean(llm)


class TestLife:
    def test_closed(self, model: str) -> None:
        llm = LLM(model, backend="reference")
        assert "context 256" in repr(llm) and "llama, 2 layers of width 64" in repr(llm)
        llm.close()
        llm.close()
        assert repr(llm).endswith("closed)")
        for use in (lambda: llm.generate("hello"), lambda: llm.chat(MESSAGES), lambda: llm.stream("hello")):
            with pytest.raises(ClosedError):
                use()

    def test_closed_under_a_stream(self, model: str) -> None:
        llm = LLM(model, backend="reference")
        pieces = llm.stream("hello", GREEDY)
        next(pieces)
        llm.close()
        with pytest.raises(ClosedError):
            list(pieces)

    def test_the_package_is_light(self) -> None:
        assert set(headrace.__all__) <= set(dir(headrace))
        with pytest.raises(AttributeError, match="no attribute 'Llm'"):
            _ = headrace.Llm
        assert "torch" not in sys.modules or "transformers" in sys.modules


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_modle_len": 5}, "unknown option 'max_modle_len'; did you mean max_model_len?"),
            ({"backend": "cuda"}, "backend must be one of cpu, reference, not 'cuda'"),
            ({"proposer": "nrgam"}, "proposer must be one of off, auto, ngram"),
            ({"proposer": "draft_model"}, "needs a smaller model with the same vocabulary: set draft_model"),
            ({"proposer": "self_draft"}, "draft_layers is 0, and must be 1 to"),
            ({"proposer": "self_draft", "draft_layers": 99}, "draft_layers is 99, and must be 1 to"),
            ({"proposer": "auto", "draft_layers": 99}, "draft_layers is 99, and must be 1 to"),
            ({"proposer": "medusa"}, "needs heads that were trained for the model: set medusa_heads"),
            ({"proposer": "medusa", "medusa_heads": "nowhere"}, "nowhere: no such file"),
            ({"draft_model": "smollm2"}, "draft_model is for proposer 'draft_model' or 'auto', and the proposer is 'off'"),
            ({"proposer": "ngram", "draft_layers": 2}, "draft_layers is for proposer 'self_draft'"),
            ({"draft_width": 0}, "draft_width must be a whole number from 1"),
            ({"acceptance_method": "likely"}, "acceptance_method must be one of exact, rejection, typical"),
            ({"acceptance_method": "typical"}, "acceptance_method 'typical' is about drafts, and the proposer is 'off'"),
            ({"proposer": "ngram", "acceptance_method": "rejection"}, "is for chains of drafts drawn by a model"),
            ({"proposer": "auto", "acceptance_method": "rejection"}, "is for chains of drafts drawn by a model"),
            ({"proposer": "self_draft", "draft_layers": 1, "draft_width": 2, "acceptance_method": "rejection"}, "draft_width 1"),
            ({"max_draft_tokens": 0}, "max_draft_tokens must be a whole number from 1"),
            ({"adaptive_speculation": "no"}, "adaptive_speculation must be true or false, not 'no'"),
            ({"kv_dtype": "int3"}, "kv_dtype must be one of bf16, f32, int8, int4"),
            ({"backend": ["cpu"]}, "backend must be one of"),
            ({"max_num_seqs": 0}, "max_num_seqs must be a whole number from 1"),
            ({"threads": -1}, "threads"),
            ({"chunked_prefill_size": 0}, "chunked_prefill_size must be a whole number from 1"),
            ({"prefix_cache": 1}, "prefix_cache must be true or false, not 1"),
            ({"target_token_ms": -1}, "target_token_ms must be a number from 0"),
            ({"seed": 0.5}, "seed"),
            ({"max_model_len": 257}, "max_model_len is 257, and the model's context ends at 256"),
        ],
    )
    def test_refused(self, model: str, options: dict[str, Any], message: str) -> None:
        with pytest.raises((RequestError, ModelNotFoundError)) as error:
            LLM(model, **options)
        assert message in str(error.value)

    def test_no_such_model(self) -> None:
        with pytest.raises(ModelNotFoundError):
            LLM("/no/such/model.gguf")

    def test_defaults(self) -> None:
        assert engine_config({}) == EngineConfig()

    def test_chunks_for_whole_results(self) -> None:
        for options, chunked_prefill_size in (({}, 512), ({"max_num_batched_tokens": 64}, 64), ({"chunked_prefill_size": 7}, 7)):
            with LLM("smollm2", max_model_len=64, max_num_seqs=1, **options) as llm:
                assert llm.config.chunked_prefill_size == chunked_prefill_size


class TestKvSize:
    MODEL = tiny_model(0, context=1000)
    BLOCK = 2 * 2 * 32 * (8 + 16) * 2  # layers, KV heads, tokens, head dim of K and, padded, of V, bytes
    WEIGHTS = 10_000

    def size(self, blocks: float, **options: Any) -> KvConfig:
        """With memory for so many blocks beside the weights."""
        models = [KvUse(trace_model(*self.MODEL).kv_groups, 512)]
        (kv,) = size_kv(models, engine_config(options), 1000, self.WEIGHTS, self.WEIGHTS + int(blocks * self.BLOCK))
        return kv

    def test_enough_for_all_sequences(self) -> None:
        assert self.size(10_000, max_num_seqs=3) == KvConfig((3 * 32,), 32, "bf16")

    def test_half_of_the_memory(self) -> None:
        assert self.size(200).num_blocks == (100,)
        assert self.size(200, kv_dtype="f32").num_blocks == (50,)

    def test_at_least_one_sequence(self) -> None:
        assert self.size(40).num_blocks == (32,)

    def test_as_asked_for(self) -> None:
        assert self.size(8, kv_blocks=7).num_blocks == (7,)

    def test_layers_with_a_window_have_what_all_sequences_can_need(self) -> None:
        """Two layers see everything and four 64 tokens: of those a step of 512 rows touches 19 blocks."""
        model = tiny_model(0, context=4096, layers=6, window=(0, 64, 64))
        groups = trace_model(*model).kv_groups
        of_sequence = [128 * self.BLOCK, 19 * 2 * self.BLOCK]

        def sizes(memory: int, **options: Any) -> tuple[int, ...]:
            (kv,) = size_kv([KvUse(groups, 512)], engine_config(options), 4096, self.WEIGHTS, self.WEIGHTS + memory)
            return kv.num_blocks

        assert sizes(10**9, max_num_seqs=3) == (3 * 128, 3 * 19)
        assert sizes(10**9, kv_blocks=1000, max_num_seqs=3) == (1000, 3 * 19)
        assert sizes(10**9, kv_blocks=10) == (10, 10)  # however the tokens of ten blocks are divided among sequences
        for memory in (10**7, 3 * 10**7, 10**8):  # half of it, or one sequence with as many windows as fit beside it
            full, windowed = sizes(memory)
            nbytes = full * self.BLOCK + 2 * windowed * self.BLOCK
            assert full == 128 or full * self.BLOCK + 2 * min(windowed, 64 * 19) * self.BLOCK > memory // 2 - 3 * self.BLOCK
            assert nbytes <= max(memory // 2, sum(of_sequence)) and windowed >= 19
        with pytest.raises(MemoryLimitError):
            sizes(sum(of_sequence) - 1)
        assert sizes(sum(of_sequence)) == (128, 19)

    @pytest.mark.parametrize(
        ("blocks", "options", "message"),
        [
            (20.5, {}, "10,000 bytes of weights and 196,608 bytes of KV for 1,024 tokens are 206,608 bytes, and 135,952 are available"),
            (20.5, {}, "set max_model_len to 640 or less"),
            (20.5, {"kv_blocks": 21}, "kv_blocks may be 20"),
            (-1, {}, "the model is too large for this machine"),
        ],
    )
    def test_too_much(self, blocks: float, options: dict[str, Any], message: str) -> None:
        with pytest.raises(MemoryLimitError) as error:
            self.size(blocks, **options)
        assert message in str(error.value)
