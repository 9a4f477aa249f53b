"""Loaded adapters and their users."""

from dataclasses import dataclass
from itertools import count

from headrace.backend import Executable
from headrace.errors import RequestError
from headrace.program.adapter import Adapter, adapter_bytes
from headrace.validation import check_names


@dataclass(eq=False)
class LoadedAdapter:
    name: str
    number: int
    scope: str
    """KV is shared only within a scope, and each load makes a new one."""
    num_bytes: int
    num_users: int = 0


class Adapters:
    """Loads and unloads adapters between steps."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self._loaded: dict[str, LoadedAdapter] = {}
        self._held: dict[int, LoadedAdapter] = {}
        """By number, with those that were unloaded before their last request ended."""
        self._scopes = count()

    @property
    def users(self) -> dict[str, int]:
        return {name: adapter.num_users for name, adapter in self._loaded.items()}

    @property
    def num_bytes(self) -> int:
        return sum(adapter.num_bytes for adapter in self._held.values())

    def load(self, name: str, adapter: Adapter) -> None:
        """Load an adapter. Raises RequestError if the name is taken."""
        if name in self._loaded:
            raise RequestError(
                f"adapter {name!r} is already loaded; unload it first or choose another name"
            )
        number = self._executable.add_adapter(adapter)
        scope = f"{name}#{next(self._scopes)}"
        loaded = LoadedAdapter(
            name=name, number=number, scope=scope, num_bytes=adapter_bytes(adapter)
        )
        self._loaded[name] = self._held[number] = loaded

    def unload(self, name: str) -> None:
        """Unload an adapter; its last request frees it. Raises RequestError if it is not loaded."""
        self.check(name)
        self._remove_unused(self._loaded.pop(name))

    def check(self, name: str) -> None:
        if not self._loaded:
            raise RequestError(f"unknown adapter {name!r}; no adapter is loaded")
        check_names("adapter", [name], self._loaded)

    def find(self, name: str | None) -> LoadedAdapter | None:
        """Return a request's adapter, if any. Raises RequestError if it is not loaded."""
        if name is None:
            return None
        self.check(name)
        return self._loaded[name]

    def acquire(self, adapter: LoadedAdapter | None) -> None:
        if adapter:
            adapter.num_users += 1

    def release(self, adapter: LoadedAdapter | None) -> None:
        if adapter:
            adapter.num_users -= 1
            self._remove_unused(adapter)

    def _remove_unused(self, adapter: LoadedAdapter) -> None:
        if not adapter.num_users and self._loaded.get(adapter.name) is not adapter:
            del self._held[adapter.number]
            self._executable.remove_adapter(adapter.number)
