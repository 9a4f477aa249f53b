"""Routes that load and unload LoRA adapters, compatible with vLLM. The operator must allow
them, because loading opens paths on the server.
"""

from headrace.server.errors import ApiError, invalid
from headrace.server.http_exchange import HttpExchange
from headrace.server.openai_records import LoadAdapterRequest, UnloadAdapterRequest
from headrace.server.state import ServerState


async def load_adapter(http: HttpExchange, state: ServerState) -> None:
    """Load a LoRA adapter, which requests can then name as their model."""
    request = await http.read(LoadAdapterRequest)
    _check_allowed(state)
    if request.lora_name == state.settings.model_name:
        raise invalid("lora_name is the name of the model; choose another name", "lora_name")
    await state.engine.load_adapter(request.lora_name, request.lora_path)
    await http.respond({"status": "loaded", "model": request.lora_name})


async def unload_adapter(http: HttpExchange, state: ServerState) -> None:
    """Unload a LoRA adapter; requests in progress keep it until they end."""
    request = await http.read(UnloadAdapterRequest)
    _check_allowed(state)
    await state.engine.unload_adapter(request.lora_name)
    await http.respond({"status": "unloaded", "model": request.lora_name})


def _check_allowed(state: ServerState) -> None:
    if not state.settings.allow_adapter_changes:
        raise ApiError(
            403,
            "forbidden",
            "adapters cannot be changed here; start the server with --allow-adapter-changes",
        )
