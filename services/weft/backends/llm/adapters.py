"""The adapters of a model's instances: a request for the output ``lora_adapters`` lists, loads and unloads them."""

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from weft.base.core import ParameterValue
from weft.base.errors import FailedPreconditionError, InternalError, InvalidArgumentError, WeftError
from weft.base.observing.logs import get_logger
from weft.llm.config import is_adapter_name
from weft.serving.backends.base import ModelContext
from weft.serving.request.request import InferenceRequest, InferenceResponse

_log = get_logger("weft.model.llm")

ADAPTERS = "lora_adapters"
#: Request parameters: the adapter to load and its folder, or the one to unload.
LOAD, PATH, UNLOAD = "load_lora_adapter", "lora_path", "unload_lora_adapter"
#: Subfolders of this one in the folder of a version are adapters, by their names.
FOLDER = "adapters"


def adapters_of_folder(directory: Path) -> str:
    """The adapters in ``FOLDER``, as the parameter ``lora_adapters`` has them."""
    names = sorted(path.parent.name for path in directory.glob(f"{FOLDER}/*/adapter_config.json"))
    return ",".join(f"{name}={FOLDER}/{name}" for name in names)


class InstanceAdapters:
    """The adapters that all instances of one model version have, also one that is loaded again. Thread-safe.

    Args:
        model: Of any of the instances.
        root: Folder below which adapters may be loaded while the model serves; "": none may.
    """

    def __init__(self, model: ModelContext, root: str) -> None:
        self._config = model.config  # by which the instances of one load find one another
        self._root = model.directory / root if root else None
        self._banks: list[Any] = []  # ``LoraBank``, whose module imports torch
        self._wanted: dict[str, Path] | None = None
        self._lock = threading.Lock()

    def add(self, bank: Any) -> None:
        """Give an instance the adapters of the others."""
        with self._lock:
            own = {adapter.name: adapter.folder for adapter in bank.adapters}
            self._wanted = own if self._wanted is None else self._wanted
            for name, _ in own.items() - self._wanted.items():
                bank.unload(name)
            for name, folder in self._wanted.items() - own.items():
                try:
                    bank.load(name, folder)
                except WeftError as error:  # the instance serves the others
                    _log.warning("an instance that was loaded again lacks the adapter '%s': %s", name, error.message)
            self._banks.append(bank)

    def remove(self, bank: Any) -> None:
        """Forget an instance that is closed."""
        with self._lock:
            self._banks = [each for each in self._banks if each is not bank]

    def answer(self, request: InferenceRequest) -> InferenceResponse | WeftError:
        """Change what the request's parameters ask for, and list what is loaded; blocks while files are read."""
        with self._lock:
            try:
                self._change(request.call.parameters)
            except WeftError as error:
                return error
            except Exception:
                failure = InternalError("the adapters of the model could not be changed")
                _log.exception(failure.message, extra={"error_id": failure.error_id})
                return failure
            listed = [{"name": name, "path": str(folder)} for name, folder in (self._wanted or {}).items()]
        return InferenceResponse({ADAPTERS: np.array([json.dumps(listed).encode()], np.object_)})

    def _change(self, parameters: Mapping[str, ParameterValue]) -> None:
        name = parameters.get(LOAD, parameters.get(UNLOAD))
        if name is None:
            return
        if self._root is None:
            raise FailedPreconditionError(
                "the model's adapters cannot be changed while it serves; set its parameters 'lora_root', the folder "
                "that they are in, and 'max_loras'"
            )
        self._wanted = self._wanted or {}
        path = parameters.get(PATH, "")
        if not isinstance(name, str) or not is_adapter_name(name) or not isinstance(path, str) or "\0" in path:
            raise InvalidArgumentError(
                f"an adapter must have a name without spaces, ':', '=' and ',', and '{PATH}' must be a folder, got "
                f"{name!r:.80} and {path!r:.80}"
            )
        if LOAD not in parameters:
            self._wanted.pop(name, None)
            # An instance that was loaded again may lack it.
            holding = [bank for bank in self._banks if name in (adapter.name for adapter in bank.adapters)]
            for bank in holding or self._banks:
                bank.unload(name)
            return
        # Unlike ``Path.resolve`` it leaves a loop of links for those who read it.
        root, folder = (Path(os.path.realpath(place)) for place in (self._root, self._root / path))
        if not folder.is_relative_to(root):
            raise InvalidArgumentError(
                f"parameter '{PATH}' must be a folder within the model's lora_root, got {path!r:.80}"
            )
        loaded = []
        try:
            for bank in self._banks:
                bank.load(name, folder)
                loaded.append(bank)
        except BaseException:
            for bank in loaded:
                bank.unload(name)
            raise
        self._wanted[name] = folder


_shared: "WeakValueDictionary[tuple[int, str], InstanceAdapters]" = WeakValueDictionary()
_shared_lock = threading.Lock()


def adapters_of(model: ModelContext, root: str) -> InstanceAdapters:
    """The adapters that the instances of a model version share."""
    key = id(model.config), model.signature.version
    with _shared_lock:
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = InstanceAdapters(model, root)
        return found
