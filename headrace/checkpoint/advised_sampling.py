from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.checkpoint.files import find, read_json
from headrace.checkpoint.gguf import Metadata
from headrace.errors import FormatError, RequestError
from headrace.sampling_params import SamplingParams

_FOLDER = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_GGUF = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def advised_sampling(source: Metadata | Path) -> dict[str, Any]:
    """Read the values by field of `SamplingParams`. Raises FormatError."""
    if isinstance(source, Path):
        path = find(source, "generation_config.json")
        where, names = "generation_config.json", _FOLDER
        given: Mapping[str, Any] = read_json(path) if path else {}
    else:
        where, names, given = source.where, _GGUF, source
    advised = {
        field: given[name]
        for field, name in names.items()
        if name in given and given[name] is not None
    }
    try:
        params = SamplingParams(**advised)
    except RequestError as error:
        raise FormatError(f"{where}: {error}") from error
    return {field: getattr(params, field) for field in advised}
