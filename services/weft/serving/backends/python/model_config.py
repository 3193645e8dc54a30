"""The configuration of a model as a ``model.py`` reads and completes it."""

import copy
import json
from collections.abc import Mapping
from typing import Any

# Fields of 64 bits: protobuf's JSON form writes them as strings, Triton Inference Server as numbers.
INTEGER_FIELDS = frozenset(
    {
        "default_priority_level", "default_timeout_microseconds", "device_id", "dim", "dims",
        "max_queue_delay_microseconds", "max_sequence_idle_microseconds", "model_version",
        "priority_levels", "shape", "versions",
    }
)  # fmt: skip


def for_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``config`` as a ``model.py`` expects it: 64-bit integers are numbers, the main fields are there."""
    completed: dict[str, Any] = {"name": "", "max_batch_size": 0, "input": [], "output": [], "parameters": {}}
    return completed | {key: _numbered(key, value) for key, value in config.items()}


def _numbered(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _numbered(name, item) for name, item in value.items()}
    if isinstance(value, list):
        return [_numbered(key, item) for item in value]
    return int(value) if key in INTEGER_FIELDS and isinstance(value, str) else copy.copy(value)


class ModelConfig:
    """Argument and result of ``TritonPythonModel.auto_complete_config``.

    Each method raises ValueError where the configuration file contradicts.

    Args:
        model_config: The configuration as JSON.
    """

    def __init__(self, model_config: str) -> None:
        self._config = for_model(json.loads(model_config))

    def as_dict(self) -> dict[str, Any]:
        """The configuration with what has been added so far."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch size; it must not be less than the file's."""
        if self._config["max_batch_size"] > max_batch_size:
            raise self._fault(
                f"max_batch_size is {self._config['max_batch_size']} in the configuration, but the model allows "
                f"{max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching, unless the file has settings for it."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise self._fault(f"the configuration has {other}, but the model asks for dynamic_batching")
        self._config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:  # models may pass it by this name
        """Declare an input: ``name``, ``data_type``, ``dims`` and maybe ``optional``."""
        self._add("input", input, ("optional",))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Declare an output: ``name``, ``data_type`` and ``dims``."""
        self._add("output", output, ())

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set ``decoupled``: whether the model sends any number of responses to a request."""
        if unknown := set(transaction_policy_dict) - {"decoupled"}:
            raise self._fault(f"the transaction policy has no property {sorted(unknown)}; 'decoupled' is the only one")
        policy = self._config.setdefault("model_transaction_policy", {})
        for key, value in transaction_policy_dict.items():
            if policy.setdefault(key, value) != value:
                raise self._fault(f"{key} is {policy[key]} in the configuration, but the model sets {value}")

    def _add(self, kind: str, tensor: Mapping[str, Any], optional: tuple[str, ...]) -> None:
        required = ("name", "data_type", "dims")
        missing = [key for key in required if key not in tensor]
        unknown = sorted(set(tensor) - {*required, *optional})
        if missing or unknown:
            raise self._fault(f"{kind} {dict(tensor)} lacks {missing} and has unknown properties {unknown}")
        for declared in self._config[kind]:
            if declared["name"] == tensor["name"]:
                self._complete(kind, declared, tensor)
                return
        self._config[kind].append(dict(tensor))

    def _complete(self, kind: str, declared: dict[str, Any], tensor: Mapping[str, Any]) -> None:
        for key, value in tensor.items():
            if declared.get(key) not in (None, [], "TYPE_INVALID", value):
                raise self._fault(
                    f"{kind} '{tensor['name']}' has {key} {declared[key]} in the configuration, but the model says "
                    f"{value}"
                )
            declared[key] = value

    def _fault(self, text: str) -> ValueError:
        return ValueError(f"model '{self._config['name']}': {text}")
