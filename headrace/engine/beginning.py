"""The sequences of a request: as it begins, and as it begins again after a step that failed."""

from headrace.accept import Acceptor
from headrace.config import EngineConfig
from headrace.engine.output import Output, TokenizerView, end_ids
from headrace.engine.sequence import Request, Sequence
from headrace.engine.stops import StopPattern
from headrace.sampling.sampler import derive_seed, make_sampler


def begin(request: Request, config: EngineConfig, tokenizer: TokenizerView, vocab_size: int) -> None:
    """Give a request all its sequences; the first owns the others until its prompt ends."""
    params, prompt = request.params, request.prompt_token_ids
    seed = derive_seed(config.seed, request.number) if params.seed is None else params.seed
    sampler = make_sampler(params, prompt, vocab_size, seed, end_ids(params, tokenizer))
    patterns = [StopPattern(stop) for stop in params.stop or ()]
    max_tokens = request.limit - len(prompt)
    seqs = []
    for index in range(params.n if params.beam_width is None else 1):
        output = Output(params, tokenizer, patterns, max_tokens, request.constraint)
        seqs.append(Sequence((request.number, index), request, list(prompt), sampler.clone(index), output, len(prompt)))
    seqs[0].siblings = seqs[1:]
    request.seqs = seqs


def begin_again(request: Request, acceptor: Acceptor, config: EngineConfig, tokenizer: TokenizerView, vocab_size: int) -> list[Sequence]:
    """Give a request new sequences without KV, which go on behind the tokens of their outputs; returns those that are to be queued.

    Nothing else of the old ones is used, since any of it may be half changed. A beam search, of which nothing has been told, and with it
    its `acceptor`, begins from its prompt, and so does what is pooled.
    """
    outputs = [seq.output for seq in request.seqs]
    request.acceptor = acceptor
    if request.pooling:
        request.pooling.begin()
    begin(request, config, tokenizer, vocab_size)
    if acceptor.is_group or not any(output.token_ids for output in outputs):
        return request.seqs[:1]
    request.seqs[0].siblings = []
    for seq, output in zip(request.seqs, outputs, strict=True):
        seq.output = output
        seq.known += output.token_ids
        for token in output.token_ids:
            seq.sampler.append(token)
    return [seq for seq in request.seqs if seq.output.finish_reason is None]
