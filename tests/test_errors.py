"""Messages of errors: the reason, then the next step."""

import pytest

from headrace.errors import (
    ConstraintError,
    FormatError,
    HeadraceError,
    ModelNotFoundError,
    RequestError,
    UnsupportedModelError,
)


@pytest.mark.parametrize(
    "kind", [ConstraintError, FormatError, ModelNotFoundError, UnsupportedModelError]
)
def test_errors_without_advice_get_the_advice_of_their_class(kind: type[HeadraceError]) -> None:
    assert kind.advice
    assert str(kind("a.gguf: too short")) == f"a.gguf: too short; {kind.advice}"
    assert kind("a.gguf: too short").reason == "a.gguf: too short"
    assert str(kind("a.gguf: a part; name the folder")) == "a.gguf: a part; name the folder"


def test_other_errors_have_only_their_message() -> None:
    assert str(RequestError("n must be 1")) == "n must be 1"
