"""DSPy's language models: chat completions, completions and responses."""

import os
from typing import Any

from checks import KEY, LENGTH, MODEL, QUESTION, URL, embedded, raised, run

# Otherwise LiteLLM fetches prices of models from another host.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import dspy


def model(name: str = MODEL, **more: Any) -> Any:
    own = {"api_base": URL, "api_key": KEY, "temperature": 0, "max_tokens": LENGTH, "cache": False}
    return dspy.LM(f"openai/{name}", **own | {"num_retries": 0} | more)


def text_of(answer: Any) -> str:
    return answer["text"] if isinstance(answer, dict) else answer


def chat() -> str:
    (first,), (second,) = model()(QUESTION), model(model_type="responses")(QUESTION)
    assert text_of(first) == text_of(second), (first, second)
    return text_of(first)


def completion() -> None:
    """DSPy adds words to the prompt, so the text differs from that of other clients."""
    (text,) = model(model_type="text")("Once upon a time")
    assert text_of(text)


def predict() -> None:
    """A signature's field comes back by name, whatever the words."""
    signature = dspy.Signature("question -> answer")
    schema = dspy.JSONAdapter()
    with dspy.context(lm=model(max_tokens=200), adapter=schema):
        assert isinstance(dspy.Predict(signature)(question="What is 2 + 2?").answer, str)


def embeddings() -> str:
    made = dspy.Embedder(f"openai/{MODEL}", api_base=URL, api_key=KEY, caching=False)
    return embedded(made(QUESTION))


def unknown_model() -> None:
    error = raised(Exception, lambda: model("other")(QUESTION))
    assert "does not exist" in str(error), error


run(
    {
        "chat": chat,
        "completion": completion,
        "JSON schema as an object": predict,
        "embeddings": embeddings,
        "unknown model": unknown_model,
    }
)
