"""What is loaded at start and by clients, and what is refused."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from weft.base.core import IndexEntry
from weft.base.errors import (
    InternalError,
    InvalidArgumentError,
    UnavailableError,
    UnsupportedError,
    WeftError,
)
from weft.base.signature import VERSION_DIGEST_PARAMETER
from weft.serving import core as serving_core
from weft.serving.core import ServingCore
from weft.serving.lifecycle import lifecycle


async def test_configuration_by_parameter(repository: Any) -> None:
    """``config`` replaces the file until the model is unloaded; one that cannot be loaded changes nothing."""
    repository.write("m", {1: 1, 2: 2})
    core = await repository.serve(load_models=[])
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    config = {"backend": "add", "max_batch_size": 4, "version_policy": {"specific": {"versions": [1]}}}
    config |= {"input": [{"name": "X", **tensor}], "output": [{"name": "Y", **tensor}]}
    await core.load("m", {"config": json.dumps(config)})
    assert core.config("m", "").max_batch_size == 4
    assert await repository.infer(core) == 1
    with pytest.raises(InvalidArgumentError):
        await core.load("m", {"config": json.dumps(config | {"backend": "absent"})})
    await core.load("m", {})
    assert core.config("m", "").max_batch_size == 4
    assert await repository.infer(core) == 1
    await core.unload("m", unload_dependents=False)
    await core.load("m", {})
    assert core.config("m", "").max_batch_size == 8
    assert await repository.infer(core) == 2


async def test_configuration_by_parameter_starts_so_many_instances(repository: Any) -> None:
    """What a client may start is bounded apart from what the operator's file may."""
    repository.write("m", {1: 1}, repository.CONFIG + "instance_group { count: 3 }")
    core = await repository.serve(max_instances=2)
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    config = {
        "backend": "add",
        "max_batch_size": 8,
        "input": {"name": "X", **tensor},
        "output": {"name": "Y", **tensor},
    }
    await core.load("m", {"config": json.dumps(config | {"instance_group": {"count": 2}})})
    for groups in ({"count": 3}, [{"count": 2}, {"count": 1}]):
        with pytest.raises(InvalidArgumentError, match="the groups make 3 instances; at most 2 are allowed"):
            await core.load("m", {"config": json.dumps(config | {"instance_group": groups})})


@pytest.mark.parametrize(
    ("parameters", "error", "text"),
    [
        (
            {"config": "{}", "file:1/model.py": b"import os"},
            UnsupportedError,
            "start the service with --allow-load-files",
        ),
        ({"config": b"{}"}, InvalidArgumentError, "parameter 'config' must be a string"),
        ({"confg": "{}"}, InvalidArgumentError, "unknown parameter 'confg'; a load takes 'config'"),
        ({"config": "{"}, InvalidArgumentError, "parameter 'config' is not a model configuration in JSON"),
    ],
)
async def test_load_parameters_that_are_refused(
    repository: Any, parameters: dict[str, bytes | str], error: type[Exception], text: str
) -> None:
    """Files sent by a client are not used unless that is allowed; unknown parameters are not ignored."""
    repository.write("m", {1: 1})
    core = await repository.serve(load_models=[])
    with pytest.raises(error, match=text):
        await core.load("m", parameters)


async def test_load_goes_on_when_its_caller_leaves(repository: Any, gate: Any) -> None:
    """A cancelled call leaves no half-loaded model: the load ends, and the model serves."""
    repository.write("m", {1: 1})
    core = await repository.serve(gate.on_load(), load_models=[])
    loading = asyncio.create_task(core.load("m", {}))
    await gate.has_entered()
    assert core.index(ready_only=False) == [IndexEntry("m", "1", "LOADING", "")]
    with pytest.raises(UnavailableError, match="is not at ready state"):
        await repository.infer(core)
    loading.cancel()
    gate.is_open.set()
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)
    assert await repository.infer(core) == 1


async def test_a_definition_is_read_on_a_thread_that_may_be_left_alone(repository: Any, gate: Any) -> None:
    """Auto-complete of user code may hang, which must not keep the process alive."""
    is_daemon: list[bool] = []

    class Completes(repository.BACKEND):
        @staticmethod
        def auto_complete(config: dict[str, Any], directory: Any) -> dict[str, Any]:
            is_daemon.append(threading.current_thread().daemon)
            gate.wait()
            return config

    repository.write("m", {1: 1}, 'backend: "add"')
    core = await repository.serve(Completes, load_models=[])
    loading = asyncio.create_task(core.load("m", {}))
    await gate.has_entered()
    await asyncio.wait_for(core.close(grace_s=0), 3)
    assert loading.cancelled()
    assert is_daemon == [True]
    gate.is_open.set()


async def test_exit_in_auto_complete_fails_the_load(repository: Any) -> None:
    """User code that raises what would end a program fails its own load and nothing else."""

    class Exits(repository.BACKEND):
        @staticmethod
        def auto_complete(config: dict[str, Any], directory: Any) -> dict[str, Any]:
            raise KeyboardInterrupt

    repository.write("m", {1: 1}, 'backend: "add"')
    core = await repository.serve(Exits, load_models=[])
    with pytest.raises(InternalError, match="auto-complete of model 'm' by backend 'add' failed"):
        await core.load("m", {})


async def test_auto_complete_that_hangs_fails_the_load(repository: Any, gate: Any, monkeypatch: Any) -> None:
    """After a bounded time the model is unavailable with the reason, and another one loads in its place."""

    class Hangs(repository.BACKEND):  # type: ignore[misc,name-defined]  # the base is a value here
        completes_always = True

        @staticmethod
        def auto_complete(config: dict[str, Any], directory: Any) -> dict[str, Any]:
            if not gate.is_open.is_set():
                gate.wait()
            return config

    repository.write("m", {1: 1})
    core = repository.core(Hangs, load_concurrency=1)
    await core.start()
    with monkeypatch.context() as short:
        short.setattr(lifecycle, "DEFINE_LIMIT_S", 0.1)
        with pytest.raises(
            UnavailableError, match=r"not complete after 0.1 s; auto_complete_config .* does not return"
        ):
            await core.load("m", {})
    (entry,) = core.index(ready_only=False)
    assert ("UNAVAILABLE", True) == (entry.state, "does not return" in entry.reason)
    gate.is_open.set()
    await core.load("m", {})
    assert 1 == await repository.infer(core)


async def test_the_configuration_tells_of_a_versions_files(repository: Any) -> None:
    """Files replaced under the same configuration are seen after a reload; a digest that a client gives is dropped."""
    repository.write("m", {1: 1})
    core = await repository.serve()

    def digest() -> str:
        return str(core.config("m", "").parameters[VERSION_DIGEST_PARAMETER].string_value)

    first = digest()
    (repository.root / "m/1/weights").write_bytes(b"others")
    assert first == digest() != ""
    await core.load("m", {})
    second = digest()
    assert first != second
    config = MessageToDict(core.config("m", ""), preserving_proto_field_name=True)
    config["parameters"] = {VERSION_DIGEST_PARAMETER: {"string_value": "forged"}}
    await core.load("m", {"config": json.dumps(config)})
    assert second == digest()


@pytest.fixture
async def core(repository: Any, monkeypatch: pytest.MonkeyPatch) -> ServingCore:
    """Polls a repository with model m, version 1, all the time."""
    monkeypatch.setattr(serving_core, "SETTLE_S", 0.0)
    repository.write("m", {1: 1})
    return await repository.serve(model_control="poll", load_models=(), repository_poll_s=0.01)  # type: ignore[no-any-return]


async def until(holds: Callable[[], bool]) -> None:
    """Return when it holds."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  # the index tells nobody when it changes
            await asyncio.sleep(0.005)


def states(core: ServingCore) -> list[tuple[str, str, str]]:
    """Name, version and state of the index."""
    return [entry[:3] for entry in core.index(ready_only=False)]


async def test_a_model_that_went_while_the_core_started(repository: Any, core: ServingCore) -> None:
    """There is nothing to unload, and what else has changed is loaded."""
    core._known["brief"] = ()
    repository.write("n", {1: 7})
    await until(lambda: ("n", "1", "READY") in states(core))
    assert await repository.infer(core, "n") == 7


async def test_a_load_that_hangs_holds_up_no_other_change(repository: Any, core: ServingCore, gate: Any) -> None:
    """Others are taken over meanwhile, the index says LOADING, and a mended file is loaded in its place at once."""
    core._backends = {**core._backends, "slow": gate.on_load()}
    repository.write("slow", {1: 1}, config=repository.CONFIG.replace('"add"', '"slow"'))
    await until(lambda: ("slow", "1", "LOADING") in states(core))
    repository.write("m", {1: 3})
    repository.write("n", {1: 7})
    await until(lambda: ("n", "1", "READY") in states(core))
    repository.write("slow", {1: 8})
    await until(lambda: ("slow", "1", "READY") in states(core))
    assert (3, 8) == (await repository.infer(core), await repository.infer(core, "slow"))
    gate.is_open.set()


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "max_batch_size: 8\n"])
async def test_a_configuration_that_an_edit_has_emptied_is_passed_over(
    repository: Any, core: ServingCore, text: str
) -> None:
    """What serves goes on, without a reload; the finished edit is taken over. A new model may say as little."""
    repository.write("n", {1: 7}, config=text)
    repository.write("m", {1: 3}, config=text)
    await until(lambda: any(name == "n" for name, *_ in states(core)))
    assert ("m", "1", "READY") in states(core)
    assert (await repository.infer(core), core.index(ready_only=False)[0].reason) == (1, "")
    repository.write("m", {1: 3})
    async with asyncio.timeout(10):
        while await repository.infer(core) != 3:  # noqa: ASYNC110  # a reload tells nobody
            await asyncio.sleep(0.005)


async def test_nothing_is_lost_while_models_are_replaced(repository: Any, core: ServingCore) -> None:
    """Every request during twenty reloads is answered, by one version or the other."""
    answers: list[float | WeftError] = []

    async def ask() -> None:
        while True:
            answers.append(await repository.infer(core))

    asking = asyncio.create_task(ask())
    for value in range(2, 22):
        repository.write("m", {1: value})
        await until(lambda value=value: bool(answers) and answers[-1] == value)  # type: ignore[misc]
    asking.cancel()
    assert set(answers) <= set(range(1, 22))
    assert answers == sorted(answers, key=float)  # type: ignore[arg-type]


async def test_reload_loses_no_request(repository: Any) -> None:
    """Requests that run all the while are answered, each by an old or a new version, never by an error."""
    repository.write("m", {1: 0}, repository.CONFIG + "dynamic_batching { } instance_group { count: 2 }")
    core = await repository.serve()
    is_over = False

    async def client() -> list[float]:
        answers = []
        while not is_over:
            answers.append(await repository.infer(core))
        return answers

    clients = [asyncio.create_task(client()) for _ in range(8)]
    for generation in range(1, 11):
        (repository.root / "m" / "1" / "value").write_text(str(generation))
        await core.load("m", {})
        assert await repository.infer(core) == generation
    is_over = True
    for answers in await asyncio.gather(*clients):
        assert answers == sorted(answers)
        assert len(set(answers)) > 2


async def test_metrics_tell_which_model_does_not_load(repository: Any) -> None:
    """At the start, at a reload while what was loaded before serves, and no longer once it loads or is unloaded."""
    repository.write("m", {1: 1})
    repository.write("broken", {1: "no number"})
    core = await repository.serve()

    def failed() -> dict[str, float]:
        families = (family for collector in core.extension().collectors for family in collector.collect())
        (found,) = (family for family in families if family.name == "weft_model_load_failed")
        return {sample.labels["model"]: sample.value for sample in found.samples}

    assert {"m": 0, "broken": 1} == failed()
    with pytest.raises(InvalidArgumentError):
        await core.load("m", {"config": json.dumps({"backend": "absent"})})
    assert {"m": 1, "broken": 1} == failed()
    await core.load("m", {})
    await core.unload("broken", unload_dependents=False)
    assert {"m": 0, "broken": 0} == failed()
