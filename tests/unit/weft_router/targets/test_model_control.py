"""Loads and unloads of models go to the target that has them."""

from collections.abc import Mapping
from typing import Any

import pytest

from weft_common.errors import InvalidArgumentError, RemoteError, WeftError
from weft_common.signature import ModelSignature
from weft_router.target import ControlledTarget, TargetModel
from weft_router.targets.catalog import TargetCatalog
from weft_router.targets.model_control import TargetControl


class Host:
    """A target that has some models, of which the ready ones can be listed."""

    def __init__(self, name: str, *models: str, error: WeftError | None = None) -> None:
        self.name = self.address = name
        self.models = dict.fromkeys(models, False)
        self.changes: list[tuple[str, Any]] = []
        self._error = error

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        return [
            TargetModel(ModelSignature(name, "1", "", 0, (), ()), True) for name, ready in self.models.items() if ready
        ]

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        self._change(name, True, dict(parameters))

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        self._change(name, False, unload_dependents)

    def _change(self, name: str, is_ready: bool, what: Any) -> None:
        self.changes.append((name, what))
        if self._error is not None:
            raise self._error
        if name not in self.models:
            raise RemoteError("NOT_FOUND", f"failed to load '{name}', failed to poll from model repository")
        self.models[name] = is_ready

    async def close(self) -> None:
        pass


async def test_a_model_is_loaded_where_it_is() -> None:
    """At once it is served; an unload goes to the target that serves it and to no other."""
    first, second = Host("first"), Host("second", "m")
    catalog = TargetCatalog([first, second])  # type: ignore[list-item]
    control = TargetControl([first, second], catalog)  # type: ignore[list-item]
    assert isinstance(first, ControlledTarget)
    assert await control.load("m", {"config": "{}"})
    assert [("m", {"config": "{}"})] == first.changes == second.changes
    assert "second" == catalog.entry("m", "").target
    assert await control.unload("m", unload_dependents=True)
    assert ([("m", True)], 1) == (second.changes[1:], len(first.changes))
    assert catalog.entry("m", "") is None or not catalog.entry("m", "").model.is_ready


async def test_an_error_of_a_load_is_what_the_target_says() -> None:
    """One that no target knows is not found; any other error ends the search."""
    refusing, other = Host("refusing", error=InvalidArgumentError("no")), Host("other", "m")
    targets: Any = [refusing, other]
    with pytest.raises(InvalidArgumentError, match="no"):
        await TargetControl(targets, TargetCatalog(targets)).load("m", {})
    assert not other.changes
    assert not await TargetControl([other], TargetCatalog([other])).load("x", {})  # type: ignore[list-item]
    assert [("x", {})] == other.changes
