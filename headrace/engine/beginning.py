"""The sequences of a request: as it begins, and as it goes on behind tokens that its outputs have
already.

It has some where it begins again after a step that failed, and where it was begun by another
engine, whose place this one takes.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Lists

from headrace.acceptors import Acceptor
from headrace.config import EngineConfig
from headrace.engine.output import Output, TokenizerView, end_ids
from headrace.engine.sequence import Request, Sequence
from headrace.engine.stops import StopPattern
from headrace.errors import ConstraintError, RequestError
from headrace.request import CheckedRequest
from headrace.sampling.sampler import derive_seed, make_sampler
from headrace.validation import token_ids


def begin(
    request: Request,
    config: EngineConfig,
    tokenizer: TokenizerView,
    vocab_size: int,
    given: Lists[Lists[int]] = (),
) -> list[Sequence]:
    """Give a request all its sequences, and return those that are to be queued.

    `given`: what `check_given` let pass, the tokens that each output has already. Where there are
    none, the first sequence owns the others until the prompt ends.
    """
    params, prompt = request.params, request.prompt_token_ids
    seed = derive_seed(config.seed, request.number) if params.seed is None else params.seed
    sampler = make_sampler(params, prompt, vocab_size, seed, end_ids(params, tokenizer))
    patterns = [StopPattern(stop) for stop in params.stop or ()]
    max_tokens = request.limit - len(prompt)
    seqs = []
    for index in range(params.n if params.beam_width is None else 1):
        output = Output(params, tokenizer, patterns, max_tokens, request.constraint)
        if given:
            output.resume(given[index])
        seqs.append(
            Sequence(
                (request.number, index),
                request,
                list(prompt),
                sampler.clone(index),
                output,
                len(prompt),
            )
        )
    request.seqs = seqs
    return _behind_outputs(request)


def begin_again(
    request: Request,
    acceptor: Acceptor,
    config: EngineConfig,
    tokenizer: TokenizerView,
    vocab_size: int,
) -> list[Sequence]:
    """Give a request new sequences without KV, which go on behind the tokens of their outputs;
    returns those that are to be queued.

    Nothing else of the old ones is used, since any of it may be half changed. A beam search, of
    which nothing has been told, and with it its `acceptor`, begins from its prompt, and so does
    what is pooled.
    """
    outputs = [seq.output for seq in request.seqs]
    request.acceptor = acceptor
    if request.pooling:
        request.pooling.begin()
    begin(request, config, tokenizer, vocab_size)
    if not acceptor.is_group:
        for seq, output in zip(request.seqs, outputs, strict=True):
            seq.output = output
    return _behind_outputs(request)


def _behind_outputs(request: Request) -> list[Sequence]:
    """Let new sequences go on behind their outputs, each by itself where one of these has tokens;
    returns those that are to be queued.
    """
    first, *others = request.seqs
    if not any(seq.output.token_ids for seq in request.seqs):
        first.siblings = others
        return [first]
    first.siblings = []
    for seq in request.seqs:
        seq.known += seq.output.token_ids
        for token in seq.output.token_ids:
            seq.sampler.append(token)
    return [seq for seq in request.seqs if seq.output.finish_reason is None]


def check_given(
    given: object,
    checked: CheckedRequest,
    max_tokens: int,
    tokenizer: TokenizerView,
    vocab_size: int,
) -> CheckedRequest:
    """The request, whose outputs have these tokens already: a list for each continuation, or none
    at all.

    Raises RequestError for what no engine can have told of it: tokens that there are not, or that
    the grammar does not let follow, and such as come after the end of an output.
    """
    name, params = "output_token_ids", checked.params
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise RequestError(
            f"{name} must be a list of lists of token ids, not {type(given).__name__}"
        )
    lists = [
        token_ids(f"{name}[{i}]", tokens, max_tokens, _TOO_MANY) for i, tokens in enumerate(given)
    ]
    if not lists:
        return checked
    if params.beam_width is not None or checked.pooling:
        raise RequestError(
            f"{name} must be empty: "
            f"{'an embedding' if checked.pooling else 'a beam search'} begins from its "
            "prompt"
        )
    if len(lists) != params.n:
        raise RequestError(
            f"{name} has {len(lists)} lists, and n is {params.n}: give one for each continuation"
        )
    if (highest := max(map(max, filter(None, lists)), default=0)) >= vocab_size:
        raise RequestError(f"{name} has {highest:,}, and the vocabulary ends at {vocab_size - 1:,}")
    patterns = [StopPattern(stop) for stop in params.stop or ()]
    ended = 0
    for i, tokens in enumerate(lists):
        output = Output(params, tokenizer, patterns, max_tokens, checked.constraint)
        try:
            output.resume(tokens)
        except ConstraintError as error:
            raise RequestError(f"{name}[{i}] cannot be: {error}") from None
        if len(output.token_ids) < len(tokens):
            raise RequestError(
                f"{name}[{i}] goes on behind its end, which is its token {len(output.token_ids):,}"
            )
        ended += output.finish_reason is not None
    if ended == len(lists):
        raise RequestError(
            f"{name} leaves nothing to do: all continuations have come to their ends"
        )
    return checked._replace(output_token_ids=lists)


_TOO_MANY = "{name} has {count} tokens, and no more than {limit:,} may follow the prompt"
