"""lm-eval's `local-completions`, with the server's own tokenizer."""

import json
import os

from checks import KEY, MODEL, URL, run
from scored import PAIRS, TEXTS, WINDOW

os.environ["OPENAI_API_KEY"] = KEY

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

lm = LocalCompletionsAPI(
    base_url=f"{URL}/completions",
    model=MODEL,
    tokenizer_backend="remote",
    auth_token=KEY,
    max_length=WINDOW + 2,
    batch_size=2,
)


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


def prefix() -> str:
    return str(lm.prefix_token_id)


def loglikelihood() -> str:
    found = lm.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    return json.dumps([list(pair) for pair in found])


def rolling() -> str:
    asked = instances("loglikelihood_rolling", [(text,) for text in TEXTS])
    return json.dumps(lm.loglikelihood_rolling(asked, disable_tqdm=True))


def until() -> None:
    """Both routes end before a stop text."""
    options = {"until": ["\n"], "max_gen_toks": 16, "temperature": 0}
    asked = instances("generate_until", [("Once upon a time", options)])
    (text,) = lm.generate_until(asked, disable_tqdm=True)
    assert text and "\n" not in text


run(
    {
        "prefix token": prefix,
        "loglikelihoods": loglikelihood,
        "rolling loglikelihoods": rolling,
        "text until a stop": until,
    }
)
