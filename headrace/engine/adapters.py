"""The adapters that an engine has loaded, and the requests that have them."""

from dataclasses import dataclass
from itertools import count

from headrace.backend import Executable
from headrace.errors import RequestError
from headrace.program.adapter import Adapter
from headrace.validation import check_names


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter that the executable keeps."""

    name: str
    number: int
    """By which the batches of the executable name it."""
    scope: str
    """Within which KV may be shared: of no other adapter, also not of another one that is loaded
    under this name later.
    """
    num_users: int = 0
    """Requests under way that have it. Once it is unloaded it goes with the last of them."""


class Adapters:
    """Loads and unloads adapters between steps."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self._loaded: dict[str, LoadedAdapter] = {}
        self._scopes = count()

    @property
    def users(self) -> dict[str, int]:
        """Requests under way of each, by name."""
        return {name: adapter.num_users for name, adapter in self._loaded.items()}

    def load(self, name: str, adapter: Adapter) -> None:
        """Make an adapter known. Raises RequestError for a name that is taken."""
        if name in self._loaded:
            raise RequestError(
                f"an adapter {name!r} is loaded already: unload it first, or choose another name"
            )
        self._loaded[name] = LoadedAdapter(
            name, self._executable.add_adapter(adapter), f"{name}#{next(self._scopes)}"
        )

    def unload(self, name: str) -> None:
        """Forget a name; requests under way keep its adapter to their end. Raises RequestError for
        one that is not loaded.
        """
        self.check(name)
        self._remove_unused(self._loaded.pop(name))

    def check(self, name: str) -> None:
        """Raise RequestError for a name under which nothing is loaded."""
        if not self._loaded:
            raise RequestError(f"there is no adapter {name!r}: none is loaded")
        check_names("adapter", [name], self._loaded)

    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter that a request names, if any. Raises RequestError as `check` does."""
        if name is None:
            return None
        self.check(name)
        return self._loaded[name]

    def acquire(self, adapter: LoadedAdapter | None) -> None:
        """A request with it is under way."""
        if adapter:
            adapter.num_users += 1

    def release(self, adapter: LoadedAdapter | None) -> None:
        """A request with it has ended."""
        if adapter:
            adapter.num_users -= 1
            self._remove_unused(adapter)

    def _remove_unused(self, adapter: LoadedAdapter) -> None:
        if not adapter.num_users and self._loaded.get(adapter.name) is not adapter:
            self._executable.remove_adapter(adapter.number)
