"""Adapters that the instances of a model share, and requests that change them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.backends.llm.builders import make_request

from weft.backends.llm import tensors
from weft.backends.llm.adapters import InstanceAdapters, adapters_of
from weft.base.errors import FailedPreconditionError, InternalError, InvalidArgumentError, NotFoundError, WeftError
from weft.base.signature import ModelSignature
from weft.serving.backends.base import ModelContext


class Bank:
    """Keeps names and folders; loads none of the folders in ``bad``."""

    def __init__(self, **folders: Path) -> None:
        self.folders = dict(folders)
        self.bad: set[str] = set()

    @property
    def adapters(self) -> list[Any]:
        return [SimpleNamespace(name=name, folder=folder) for name, folder in self.folders.items()]

    def load(self, name: str, folder: Path) -> None:
        if folder.name in self.bad:
            raise (MemoryError if folder.name == "broken" else InvalidArgumentError)(f"{folder.name} is bad")
        self.folders[name] = folder

    def unload(self, name: str) -> None:
        if self.folders.pop(name, None) is None:
            raise NotFoundError(f"adapter '{name}' is not loaded")


def make_model(directory: Path, config: dict[str, Any]) -> ModelContext:
    return ModelContext(ModelSignature("m", "1", "llm", 0, (), ()), directory, config, {})


@pytest.fixture
def shared(tmp_path: Path) -> InstanceAdapters:
    """Of a model whose adapters may be loaded from its folder ``more``."""
    (tmp_path / "more").mkdir()
    return adapters_of(make_model(tmp_path, {}), "more")


def answer(shared: InstanceAdapters, **parameters: Any) -> dict[str, str] | WeftError:
    """Names and folders that the answer lists, or its error."""
    found = shared.answer(make_request(outputs=["lora_adapters"], parameters=parameters))
    if isinstance(found, WeftError):
        return found
    return {one["name"]: Path(one["path"]).name for one in json.loads(found.outputs["lora_adapters"][0])}


def test_instances_of_one_load_share_their_adapters(tmp_path: Path) -> None:
    """By their configuration; those of another load of the same folder do not."""
    config: dict[str, Any] = {}
    first, second = (adapters_of(make_model(tmp_path, config), "") for _ in range(2))
    assert first is second
    assert first is not adapters_of(make_model(tmp_path, {}), "")


def test_all_instances_have_an_adapter_or_none(shared: InstanceAdapters, tmp_path: Path) -> None:
    """A load that fails in one is undone in the others; an unload reaches all."""
    banks = [Bank(a=tmp_path / "a"), Bank(a=tmp_path / "a")]
    for bank in banks:
        shared.add(bank)
    assert {"a": "a", "b": "x"} == answer(shared, load_lora_adapter="b", lora_path="x")
    assert {"b": "x"} == answer(shared, unload_lora_adapter="a")
    banks[1].bad.add("y")
    assert isinstance(answer(shared, load_lora_adapter="c", lora_path="y"), InvalidArgumentError)
    assert [{"b"}, {"b"}] == [bank.folders.keys() for bank in banks]


def test_an_instance_that_is_loaded_again_has_those_of_the_others(shared: InstanceAdapters, tmp_path: Path) -> None:
    """What was loaded and unloaded while it served, but one that cannot be read any more."""
    first = Bank(a=tmp_path / "a", b=tmp_path / "b")
    shared.add(first)
    answer(shared, unload_lora_adapter="a")
    answer(shared, load_lora_adapter="c", lora_path="c")
    answer(shared, load_lora_adapter="d", lora_path="gone")
    shared.remove(first)
    again = Bank(a=tmp_path / "a", b=tmp_path / "b")
    again.bad.add("gone")
    other = Bank(b=tmp_path / "b")
    for bank in (again, other):
        shared.add(bank)
    assert {"b", "c"} == again.folders.keys()
    assert {"b", "c"} == answer(shared, unload_lora_adapter="d").keys()
    assert {"b", "c"} == other.folders.keys()
    assert isinstance(answer(shared, unload_lora_adapter="d"), NotFoundError)


@pytest.mark.parametrize(
    "parameters",
    [
        {"load_lora_adapter": 3, "lora_path": "x"},
        {"load_lora_adapter": "", "lora_path": "x"},
        {"load_lora_adapter": "n" * 129, "lora_path": "x"},
        {"load_lora_adapter": "b", "lora_path": True},
        {"load_lora_adapter": "b", "lora_path": ".."},
        {"load_lora_adapter": "b", "lora_path": "/"},
        {"unload_lora_adapter": 3},
    ],
    ids=str,
)
def test_bad_changes_are_refused(shared: InstanceAdapters, parameters: dict[str, Any]) -> None:
    """Names and folders; a link that leads out of the root too."""
    assert isinstance(answer(shared, **parameters), InvalidArgumentError)


def test_a_link_out_of_the_root_is_refused(shared: InstanceAdapters, tmp_path: Path) -> None:
    """As a folder outside is."""
    (tmp_path / "more" / "link").symlink_to(tmp_path, target_is_directory=True)
    assert isinstance(answer(shared, load_lora_adapter="b", lora_path="link"), InvalidArgumentError)


def test_a_load_that_breaks_is_undone_too(shared: InstanceAdapters) -> None:
    """The request is answered, no instance has the adapter, and the next load works."""
    banks = [Bank(), Bank()]
    for bank in banks:
        shared.add(bank)
    banks[1].bad.add("broken")
    assert isinstance(answer(shared, load_lora_adapter="b", lora_path="broken"), InternalError)
    assert [{}, {}] == [bank.folders for bank in banks]
    assert {"b": "x"} == answer(shared, load_lora_adapter="b", lora_path="x")


def test_without_a_root_nothing_is_changed(tmp_path: Path) -> None:
    """But listed."""
    shared = adapters_of(make_model(tmp_path, {}), "")
    shared.add(Bank(a=tmp_path / "a"))
    assert isinstance(answer(shared, unload_lora_adapter="a"), FailedPreconditionError)
    assert {"a": "a"} == answer(shared)


def test_a_folder_names_its_adapters(tmp_path: Path) -> None:
    """The subfolders of ``adapters`` that have a configuration, unless the model's own names others."""
    for name in ("b", "a", "empty"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        if name != "empty":
            (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    done = tensors.complete({"name": "m"}, tmp_path)["parameters"]
    assert {"string_value": "a=adapters/a,b=adapters/b"} == done["lora_adapters"]
    own = {"lora_adapters": {"string_value": "c=d"}}
    assert (
        own["lora_adapters"]
        == tensors.complete({"name": "m", "parameters": own}, tmp_path)["parameters"]["lora_adapters"]
    )
