"""Where numba keeps compiled kernels on disk, safe for processes and processors that share a directory."""

import hashlib
import logging
from collections.abc import Callable
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

_log = logging.getLogger("weft.kernels")


class KernelCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of a function, with the files of ``KernelFiles``.

    Args:
        function: What is compiled.

    Raises:
        RuntimeError: No directory for the files is writable.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = KernelFiles(self._cache_path, self._impl.filename_base, stamp)


class KernelFiles(IndexDataCacheFile):  # type: ignore[misc]
    """A file for each compiled kernel, named by a digest of all that it was made from.

    numba itself numbers the files and has an index of the numbers. Two processes that compile at once can take one
    number, and each then loads what the other compiled: for other types, another size of heads or another processor.
    What cannot be read is compiled again, and what cannot be written lives as long as the process.
    """

    def load(self, key: Any) -> Any:
        """What was saved with the key; None if there is nothing, or it is damaged."""
        try:
            return self._load_data(self._name(key))
        except FileNotFoundError:
            return None
        except Exception as error:  # pickle raises anything at damaged bytes
            _log.warning("a kernel is compiled again, since '%s' cannot be read: %s", self._name(key), error)
            return None

    def save(self, key: Any, data: Any) -> None:
        """Keep ``data`` for ``load``, whole or not at all."""
        try:
            self._save_data(self._name(key), data)
        except OSError as error:
            _log.warning(
                "a compiled kernel cannot be kept in '%s', each process compiles it: %s", self._cache_path, error
            )

    def _name(self, key: Any) -> str:
        origin = repr((self._version, self._source_stamp, key)).encode()
        return f"{self._index_name.removesuffix('.nbi')}.{hashlib.sha256(origin).hexdigest()[:32]}.nbc"
