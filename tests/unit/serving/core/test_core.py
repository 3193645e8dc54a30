"""A repository behind the V2 interface: versions, states, errors."""

from typing import Any

import numpy as np
import pytest

from weft.base.core import CallContext, IndexEntry, InferCall, RequestedOutput
from weft.base.errors import InvalidArgumentError, NotFoundError, UnavailableError, WeftError
from weft.base.tensors import encode
from weft.serving.core import ServingCore


@pytest.fixture
async def core(repository: Any) -> ServingCore:
    """Serves ``good`` (versions 2 and 10); ``bad_file`` and ``bad_config`` cannot be loaded."""
    config = repository.CONFIG + "version_policy { all { } }"
    repository.write("good", {2: 2, 10: 10}, config)
    repository.write("bad_file", {1: "none", 2: 2}, config)
    repository.write("bad_config", {1: 1}, config.replace('"add"', '"ad"'))
    return await repository.serve()


async def test_default_is_the_highest_ready_version(repository: Any, core: ServingCore) -> None:
    """Versions are compared as numbers; a version that is asked for answers itself."""
    assert await repository.infer(core, "good") == 10
    assert await repository.infer(core, "good", "2") == 2
    assert await repository.infer(core, "good", "002") == 2


async def test_result_names_the_version_that_answered(repository: Any, core: ServingCore) -> None:
    """Id and version are in the answer, also where the request left the version open."""
    call = InferCall("good", request_id="r7", inputs={"X": encode(np.zeros((1, 2), np.float32))})
    call.outputs = (RequestedOutput("Y", {}),)
    results = [result async for result in core.stream_infer(call, CallContext())]
    assert [(result.model_version, result.request_id, result.is_final) for result in results] == [("10", "r7", True)]


@pytest.mark.parametrize(
    ("name", "version", "error", "text"),
    [
        ("absent", "", NotFoundError, "Request for unknown model: 'absent' is not found"),
        ("good", "99", NotFoundError, "Request for unknown model: 'good' version 99 is not found"),
        ("bad_config", "", NotFoundError, "Request for unknown model: 'bad_config' has no available versions"),
        ("bad_file", "1", UnavailableError, "'bad_file' version 1 is not at ready state; it is UNAVAILABLE"),
        ("good", "x", InvalidArgumentError, "failed to get model version from specified version string 'x'"),
        ("good", "0", InvalidArgumentError, "failed to get model version from specified version string '0'"),
        ("good", "-1", InvalidArgumentError, "failed to get model version from specified version string '-1'"),
        ("good", "../2", InvalidArgumentError, "failed to get model version from specified version string"),
        ("good", "9" * 30, InvalidArgumentError, "failed to get model version from specified version string"),
    ],
)
async def test_what_cannot_answer(
    repository: Any, core: ServingCore, name: str, version: str, error: type[WeftError], text: str
) -> None:
    """Unknown, not ready and malformed are told apart, with the texts of Triton Inference Server."""
    with pytest.raises(error, match=text):
        await repository.infer(core, name, version)
    with pytest.raises(error, match=text):
        core.signature(name, version)
    with pytest.raises(error, match=text):
        core.config(name, version)


async def test_model_that_fails_does_not_stop_the_others(repository: Any, core: ServingCore) -> None:
    """The index has every model, with the reason where it does not serve; the server is then not ready."""
    assert not core.is_ready()
    first, *rest = core.index(ready_only=False)
    assert first[:3] == ("bad_config", "", "UNAVAILABLE")
    assert first.reason.startswith(
        "failed to load 'bad_config', failed to poll from model repository: "
        f"{repository.root}/bad_config/config.pbtxt:1:10: error: unknown backend 'ad'; did you mean 'add'?"
    )
    failure = "load failed for model 'bad_file': version 1 is at UNAVAILABLE state: file 'value' has no number;"
    assert rest == [
        IndexEntry("bad_file", "1", "UNAVAILABLE", "file 'value' has no number"),
        IndexEntry("bad_file", "2", "UNAVAILABLE", failure),
        IndexEntry("good", "2", "READY", ""),
        IndexEntry("good", "10", "READY", ""),
    ]
    assert core.index(ready_only=True) == rest[2:]


async def test_readiness_of_models(repository: Any, core: ServingCore) -> None:
    """A model that failed, and a version that is not there, are not ready; an unknown model is an error."""
    assert core.is_model_ready("good", "")
    assert core.is_model_ready("good", "2")
    assert not core.is_model_ready("bad_file", "")
    assert not core.is_model_ready("bad_file", "2")
    assert not core.is_model_ready("bad_config", "")
    with pytest.raises(NotFoundError):
        core.is_model_ready("absent", "")
    assert not core.is_model_ready("good", "3")
    with pytest.raises(NotFoundError):
        core.is_model_ready("absent", "3")


async def test_server_is_ready_when_every_model_is(repository: Any) -> None:
    """Not before the start is over, and not after a model failed."""
    repository.write("m", {1: 1})
    core = repository.core(model_control="none")
    assert not core.is_ready()
    await core.start()
    assert core.is_ready()


async def test_configuration_is_completed(repository: Any, core: ServingCore) -> None:
    """The configuration that clients read has the name and the instances that were chosen."""
    config = core.config("good", "")
    assert (config.name, config.backend, config.max_batch_size) == ("good", "add", 8)
    assert [(group.name, group.count) for group in config.instance_group] == [("good_0", 1)]


async def test_statistics_are_kept_by_version(repository: Any, core: ServingCore) -> None:
    """Counters are per version: of one, of one model, or of all that serve."""
    await repository.infer(core, "good", "2")
    await repository.infer(core, "good", "2")
    assert [(entry.version, entry.success.count) for entry in core.statistics("good", "")] == [("2", 2), ("10", 0)]
    assert [entry.success.count for entry in core.statistics("good", "2")] == [2]
    assert [entry.name for entry in core.statistics("", "")] == ["good", "good"]
    with pytest.raises(NotFoundError):
        core.statistics("absent", "")
