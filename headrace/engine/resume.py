"""Creates new or resumed sequences of a request."""

from collections.abc import Iterable
from collections.abc import Sequence as Lists

from headrace.acceptors import Acceptor
from headrace.engine.output import Output, TokenizerView, end_ids, stop_patterns
from headrace.engine.sequence import Request, Sequence
from headrace.errors import ConstraintError, RequestError
from headrace.request import CheckedRequest, PathOptions
from headrace.sampling.sampler import derive_seed, make_sampler
from headrace.validation import token_ids

_TOO_MANY = "{name} has {count} tokens, but at most {limit:,} may follow the prompt"


def create_sequences(
    request: Request,
    seed: int,
    tokenizer: TokenizerView,
    vocab_size: int,
    output_token_ids: Lists[Lists[int]] = (),
) -> list[Sequence]:
    """Create all sequences of a request, and return the sequences to queue.

    A request without a seed gets one from the base seed `seed` and its number. The sequences
    continue after `output_token_ids`. Without these the first sequence computes the prompt
    for its siblings.
    """
    params, prompt = request.params, request.prompt_token_ids
    own_seed = derive_seed(seed, request.number) if params.seed is None else params.seed
    ends = end_ids(params, tokenizer)
    sampler = make_sampler(params, prompt, vocab_size, own_seed, ends)
    path = request.options.path or PathOptions()
    patterns = stop_patterns(params, tokenizer)
    max_tokens = request.limit - len(prompt)

    seqs: list[Sequence] = []
    for index in range(params.n if params.beam_width is None else 1):
        output = Output(params, tokenizer, patterns, max_tokens, request.constraint)
        if output_token_ids:
            output.resume(output_token_ids[index])
        seq = Sequence(
            seq_id=(request.number, index),
            request=request,
            known=list(prompt),
            # Outputs with seeds of their own are those of requests with n = 1.
            sampler=(
                make_sampler(params, prompt, vocab_size, path.seeds[index], ends)
                if path.seeds
                else sampler.clone(index)
            ),
            output=output,
            fork_at=len(prompt),
            keep=path.keep[index] if path.keep else "",
        )
        seqs.append(seq)
    request.seqs = seqs
    return _resume_after_outputs(request)


def recreate_sequences(
    request: Request,
    acceptor: Acceptor,
    seed: int,
    tokenizer: TokenizerView,
    vocab_size: int,
) -> list[Sequence]:
    """Replace all sequences after a failed step, and return the sequences to queue.

    They continue after the tokens of the old outputs; the step may have changed anything else. A
    beam search and pooling restart.
    """
    outputs = [seq.output for seq in request.seqs]
    request.acceptor = acceptor
    if request.pooling:
        request.pooling.reset()
    create_sequences(request, seed, tokenizer, vocab_size)
    if not acceptor.is_group:
        for seq, output in zip(request.seqs, outputs, strict=True):
            seq.output = output
    return _resume_after_outputs(request)


def _resume_after_outputs(request: Request) -> list[Sequence]:
    first, *others = request.seqs
    if not any(seq.output.token_ids for seq in request.seqs):
        first.siblings = others
        return [first]

    # The outputs differ, so each sequence computes its tokens by itself.
    first.siblings = []
    for seq in request.seqs:
        seq.known += seq.output.token_ids
        for token in seq.output.token_ids:
            seq.sampler.append(token)
    return [seq for seq in request.seqs if seq.output.finish_reason is None]


def check_output_tokens(
    output_token_ids: object,
    checked: CheckedRequest,
    max_tokens: int,
    tokenizer: TokenizerView,
    vocab_size: int,
) -> CheckedRequest:
    """Return the request with the tokens of its outputs.

    Raises RequestError for unknown or forbidden tokens, or tokens after the end of an output.
    """
    name, params = "output_token_ids", checked.params
    if isinstance(output_token_ids, str | bytes) or not isinstance(output_token_ids, Iterable):
        raise RequestError(
            f"{name} must be a list of lists of token ids, not {type(output_token_ids).__name__}"
        )
    lists = [
        token_ids(f"{name}[{i}]", tokens, max_tokens, _TOO_MANY)
        for i, tokens in enumerate(output_token_ids)
    ]
    if not lists:
        return checked

    if params.beam_width is not None or checked.pooling:
        kind = "an embedding" if checked.pooling else "a beam search"
        raise RequestError(f"{name} must be empty; {kind} always starts from its prompt")
    if len(lists) != params.n:
        raise RequestError(
            f"{name} has {len(lists)} lists, but n is {params.n}; give one list for each output"
        )
    highest = max(map(max, filter(None, lists)), default=0)
    if highest >= vocab_size:
        raise RequestError(
            f"{name} has token {highest:,}, but the vocabulary ends at {vocab_size - 1:,}"
        )

    # Append the tokens to new outputs to find out where these end.
    patterns = stop_patterns(params, tokenizer)
    num_ended = 0
    for i, tokens in enumerate(lists):
        output = Output(params, tokenizer, patterns, max_tokens, checked.constraint)
        try:
            output.resume(tokens)
        except ConstraintError as error:
            raise RequestError(f"{name}[{i}] is not valid: {error}") from None
        length = len(output.token_ids)
        if length < len(tokens):
            raise RequestError(
                f"{name}[{i}] has {len(tokens):,} tokens, but the output ends after {length:,}"
            )
        num_ended += output.finish_reason is not None
    if num_ended == len(lists):
        raise RequestError(f"{name} is complete; at least one output must be unfinished")
    return checked._replace(output_token_ids=lists)
