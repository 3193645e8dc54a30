"""Loads and unloads of models through the router, over real sockets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.unit.weft_router.targets.test_target import TinyCore, serving

from weft_common.core import IndexEntry
from weft_common.errors import InvalidArgumentError, NotFoundError, RemoteError, UnavailableError
from weft_router.core import RouterCore
from weft_router.targets.connect import make_target


class LoadableCore(TinyCore):
    """A service in explicit mode that loads `double` when it is told so; `asked` has what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ""
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.error: Exception | None = None

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry("double", "3" if self.state == "READY" else "", self.state, "")]

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        self.asked.append(("load", name, dict(parameters)))
        if self.error is not None:
            raise self.error
        self.state = "READY"

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.asked.append(("unload", name, {"unload_dependents": unload_dependents}))
        self.state = "UNAVAILABLE"


@pytest.mark.parametrize("policy", [(), ("two",)])
async def test_models_are_loaded_and_unloaded_through_the_router(tmp_path: Path, policy: tuple[str, ...]) -> None:
    """At every replica, with their parameters, and known as such when the answer comes; the service's mode counts."""
    first, second = LoadableCore(), LoadableCore()
    async with serving(first) as port, serving(second) as other:
        address = f"127.0.0.1:{port},127.0.0.1:{other}" if policy else f"127.0.0.1:{port}"
        cores = [first, second] if policy else [first]
        router = RouterCore(tmp_path, [make_target("model", address)])
        await router.start()
        try:
            with pytest.raises(NotFoundError):
                router.is_model_ready("double", "")
            await router.load("double", {"config": "{}"})
            assert router.is_model_ready("double", "")
            await router.unload("double", unload_dependents=True)
            for core in cores:
                told = [("load", "double", {"config": "{}"}), ("unload", "double", {"unload_dependents": True})]
                assert told == core.asked
                core.error = InvalidArgumentError("failed to load 'double': bad file")
            with pytest.raises(RemoteError, match="bad file") as caught:
                await router.load("double", {})
            assert "INVALID_ARGUMENT" == caught.value.code
            with pytest.raises(InvalidArgumentError, match="files cannot be sent"):
                await router.load("double", {"file:1/model.py": b""})
            with pytest.raises(UnavailableError, match="--model-control-mode explicit"):
                await router.load("nobody", {})
        finally:
            await router.close(grace_s=0)
