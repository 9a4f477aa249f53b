"""Routes that load and unload LoRA adapters, as vLLM has them. They are off unless the operator
turns them on, since they open paths.
"""

from headrace.server.asgi import Call
from headrace.server.errors import ApiError, invalid
from headrace.server.openai_records import LoadAdapterRequest, UnloadAdapterRequest
from headrace.server.served_model import ServedModel


async def load_adapter(served: ServedModel, call: Call) -> None:
    """Load an adapter, which requests name in place of the model."""
    asked = await call.read(LoadAdapterRequest)
    _check_allowed(served)
    if asked.lora_name == served.settings.model_name:
        raise invalid("lora_name is the name of the model", "lora_name")
    await served.engine.load_adapter(asked.lora_name, asked.lora_path)
    await call.respond({"status": "loaded", "model": asked.lora_name})


async def unload_adapter(served: ServedModel, call: Call) -> None:
    """Unload an adapter; requests under way keep it."""
    asked = await call.read(UnloadAdapterRequest)
    _check_allowed(served)
    await served.engine.unload_adapter(asked.lora_name)
    await call.respond({"status": "unloaded", "model": asked.lora_name})


def _check_allowed(served: ServedModel) -> None:
    if not served.settings.allow_adapter_changes:
        raise ApiError(
            403,
            "forbidden",
            "adapters cannot be changed here: start the server with --allow-adapter-changes",
        )
