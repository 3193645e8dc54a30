"""Python models as a repository has them: nothing but ``backend`` and tensors in the configuration."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from textwrap import indent

import numpy as np
import pytest

from weft.base.core import CallContext, InferCall
from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.base.limits import check_call
from weft.base.tensors import decode, encode
from weft.serving.backends.python import PythonBackend
from weft.serving.core import ServingCore

TIMEOUT_S = 30.0
OUT = 'output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }\n'
IN = 'input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }\n'
HEAD = """\
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
"""
ANSWER = "return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.int32([os.getpid()]))]) for _ in requests]"


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable[..., object]]:
    """Starts a core with one model."""
    cores: list[ServingCore] = []

    async def start(body: str, config: str) -> ServingCore:
        (tmp_path / "m" / "1").mkdir(parents=True)
        (tmp_path / "m" / "1" / "model.py").write_text(HEAD + indent(body, " " * 8) + "\n")
        (tmp_path / "m" / "config.pbtxt").write_text('backend: "python"\n' + config)
        core = ServingCore(tmp_path, {"python": PythonBackend}, num_gpus=0, model_control="explicit", load_models=["*"])
        cores.append(core)
        await core.start()
        return core

    yield start
    for core in cores:
        await core.close(grace_s=0.0)


async def _ask(core: ServingCore, value: int) -> int:
    call = InferCall("m", inputs={"IN": encode(np.array([value], np.int32))})
    result = await asyncio.wait_for(core.infer(call, CallContext()), TIMEOUT_S)
    return int(decode(result.outputs["OUT"])[0])


@pytest.mark.parametrize("fault", ["os._exit(3)", "os.kill(os.getpid(), 11)"])
async def test_model_that_ends_its_process_does_not_end_the_service(serve, fault):
    """A model runs in a process of its own unless its configuration says otherwise, and is started again."""
    core = await serve(f"if requests[0].inputs()[0].as_numpy()[0]: {fault}\n{ANSWER}", IN + OUT)
    first = await _ask(core, 0)
    with pytest.raises(UnavailableError, match="before it had answered; it is started again"):
        await _ask(core, 1)
    assert first != await _ask(core, 0)


@pytest.mark.parametrize("max_batch_size", [0, 8])
async def test_model_may_have_no_inputs(serve, max_batch_size):
    """A request without inputs is executed as one row; one with inputs does not fit."""
    body = ANSWER if not max_batch_size else ANSWER.replace("np.int32([os.getpid()])", "np.int32([[os.getpid()]])")
    core = await serve(body, f"max_batch_size: {max_batch_size}\ndynamic_batching {{ }}\n{OUT}")
    assert (await asyncio.wait_for(core.infer(InferCall("m"), CallContext()), TIMEOUT_S)).outputs
    with pytest.raises(InvalidArgumentError, match="expected 0 inputs but got 1"):
        await _ask(core, 1)


async def test_tensor_may_have_more_than_a_million_strings(serve):
    """They come in and go out of a process as they are."""
    body = "return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', r.inputs()[0].as_numpy())]) for r in requests]"
    config = 'input { name: "IN" data_type: TYPE_STRING dims: [ -1 ] }\n'
    core = await serve(body, config + config.replace("input", "output").replace('"IN"', '"OUT"'))
    strings = encode(np.full((1 << 20) + 1, b"", object))
    check_call(call := InferCall("m", inputs={"IN": strings}))
    result = await asyncio.wait_for(core.infer(call, CallContext()), TIMEOUT_S)
    assert strings == result.outputs["OUT"]


async def test_configuration_of_a_load_may_be_partial(serve):
    """What it leaves out comes from the model's files, not from ``config.pbtxt``; the model may add to it."""
    core = await serve(ANSWER, IN + OUT)
    path = core._repository.directory("m") / "1" / "model.py"
    tensor = "{'name': 'MADE', 'data_type': 'TYPE_FP32', 'dims': [1]}"
    completer = f"def auto_complete_config(config):\n    config.add_output({tensor})\n    return config\n"
    path.write_text(path.read_text() + indent(f"@staticmethod\n{completer}", " " * 4))
    await core.load("m", {"config": '{"max_batch_size": 3}'})
    config = core.config("m", "")
    assert ("python", 3, [], ["MADE"]) == (
        config.backend, config.max_batch_size, list(config.input), [output.name for output in config.output],
    )  # fmt: skip
