"""Runs a ``model.py`` in this process, on the queue, batcher and instances by which services run it."""

import asyncio
import contextlib
import tempfile
import threading
from collections import ChainMap
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack

import numpy as np
from google.protobuf import json_format
from typing_extensions import override

from weft.authoring.fakes import Fake, fake, responses_of
from weft.authoring.model import Model
from weft.authoring.running import RunOptions, request_of
from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InternalError, InvalidArgumentError, NotFoundError, WeftError
from weft.base.processes.loop_thread import LoopThread
from weft.base.repository.layout import CONFIG_FILENAME, existing_file, is_version
from weft.base.tensors import decode, encode
from weft.base.text.pbtxt import parse
from weft.serving.backends.base import Batch, InstanceContext, ModelContext
from weft.serving.backends.python import PythonBackend
from weft.serving.backends.python.loader import complete_config
from weft.serving.backends.python.runner import FILENAME
from weft.serving.backends.python.service_end import ENVIRONMENT
from weft.serving.core import ServingCore
from weft.serving.request.request import Outcome
from weft.tools.offline import BACKENDS
from weft.v2.client.answer import Answer
from weft_protos.model_config_pb2 import ModelConfig

#: How long a model may take to begin with a request that is cancelled, and to end it, in seconds.
_LIMIT_S = 60.0
#: A ``model.py``, the folder of a model or of its version, or an ``@weft.model``.
Tested: TypeAlias = str | Path | Model


class Response(Answer):
    """Outputs by name, as item or attribute.

    Attributes:
        is_final: It is the last one; without outputs where the model told so after them.
        error: Of a decoupled model that goes on after it; None for a response with outputs.
    """

    def __init__(self, result: InferResult) -> None:
        super().__init__(result, {})
        self.is_final, self.error = result.is_final, result.error


@dataclass(slots=True)
class _Context(CallContext):
    """Also what the model did with the request."""

    has_begun: threading.Event = field(default_factory=threading.Event)
    has_ended: threading.Event = field(default_factory=threading.Event)
    raised: BaseException | None = None
    traceback: TracebackType | None = None

    def error(self, told: WeftError) -> BaseException:
        """What the model raised, with the traceback from its own first frame on; else what clients are told."""
        return told if self.raised is None else self.raised.with_traceback(self.traceback)


class _Backend(PythonBackend):
    """On a thread of this process, where it also completes its configuration."""

    execution_modes = ("thread", "process", "inline")

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        parameters = {key: value for key, value in model.parameters.items() if key != ENVIRONMENT}
        super().__init__(replace(model, directory=model.directory.resolve(), parameters=parameters), instance)

    @staticmethod
    def auto_complete(config: dict[str, Any], directory: Path) -> dict[str, Any]:  # type: ignore[override]
        return complete_config(config, existing_file(directory, config.get("default_model_filename") or FILENAME))

    @override
    @classmethod
    def is_remote(cls, model: ModelContext) -> bool:
        return False

    @override
    def execute(self, batch: Batch) -> list[Outcome]:
        contexts = [one.context for one in batch.requests if isinstance(one.context, _Context)]
        for one in contexts:
            one.has_begun.set()
        try:
            return super().execute(batch)
        except BaseException as error:
            place = error.__traceback__
            while place and place.tb_next and place.tb_frame.f_globals["__name__"].startswith("weft."):
                place = place.tb_next
            for one in contexts:
                one.raised, one.traceback = error, place
            raise
        finally:
            for one in contexts:
                one.has_ended.set()


class _Core(ServingCore):
    """Also answers for fakes."""

    def __init__(self, folder: Path, fakes: Mapping[str, Fake]) -> None:
        backends: Any = ChainMap[str, Any]({"python": _Backend}, *BACKENDS.values())  # type: ignore[arg-type]  # is read
        super().__init__(folder, backends, model_control="explicit")
        self._fakes = fakes

    @override
    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        if call.model_name not in self._fakes:
            return await super().infer(call, context)
        async with contextlib.aclosing(self.stream_infer(call, context)) as results:
            return await anext(results)

    @override
    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        if call.model_name not in self._fakes:
            async with contextlib.aclosing(super().stream_infer(call, context)) as results:
                async for result in results:
                    yield result
            return
        one = self._fakes[call.model_name]
        one.calls.append({name: decode(tensor, name=name) for name, tensor in call.inputs.items()})
        await asyncio.sleep(one.delay_ms / 1000)
        try:
            async for outputs in responses_of(one.answer, one.calls[-1]):
                tensors = {name: encode(np.asarray(value)) for name, value in outputs.items()}
                yield InferResult(call.model_name, "1", call.request_id, outputs=tensors, is_final=False)
        except WeftError:
            raise
        except Exception as error:
            text = f"the fake of model '{call.model_name}' raised {type(error).__name__}: {error}"
            raise InternalError(text) from error

    @override
    def _find(self, name: str) -> Any:
        try:
            return super()._find(name)
        except NotFoundError as error:
            text = f"{error.message}; give models={{'{name}': weft.fake(...)}} or its folder"
            raise error.with_message(text) from None


class TestedModel:
    """A Python model that is loaded in this process, for a ``with`` block or until ``close``.

    There is no server, and so no port::

        with weft.testing.model("model_repository/model/top2") as top2:
            assert top2(PROBS=probs).FIRST.tolist() == [[3, 1]]

    A call raises what ``execute`` raised, with its traceback, else the WeftError that clients get. ``options`` are
    those of ``Graph.run``; with ``timeout_ms`` the model sees a client that leaves then.

    Args:
        tested: A ``model.py``, the folder of a model or of its version, or an ``@weft.model``.
        models: What it may call, by name: ``weft.fake(...)``, or what that takes; or what ``tested`` may be.
        config: Text of a ``config.pbtxt``, in place of the file.

    Attributes:
        name, signature, config: Of the model, completed.

    Raises WeftError: It cannot be loaded, for the reason that a service would log.
    """

    __test__ = False  # it is no class of tests

    def __init__(self, tested: Tested, models: Mapping[str, Any] | None = None, *, config: str = "") -> None:
        models = models or {}
        given = {}
        if config:
            message, _ = parse(config, ModelConfig(), file=CONFIG_FILENAME)
            given["config"] = json_format.MessageToJson(message, preserving_proto_field_name=True)
        with contextlib.ExitStack() as stack:
            self._thread = LoopThread("weft-testing")
            stack.callback(self._thread.stop)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-testing-")))
            self.name = _placed(tested, folder)
            for name, one in models.items():
                if name == self.name or (isinstance(one, Model) and name != one.name):
                    what = "that of the tested model" if name == self.name else f"not that of model '{one.name}'"
                    raise InvalidArgumentError(f"the name '{name}' in models is {what}; give each its own")
            placed = [_placed(one, folder, name) for name, one in models.items() if isinstance(one, Tested)]
            self._core = self._thread.result(self._started(folder, models))
            stack.callback(lambda: self._thread.result(self._core.close(grace_s=_LIMIT_S)))
            for name in (*placed, self.name):
                try:
                    self._thread.result(self._core.load(name, given if name == self.name else {}))
                except WeftError as error:
                    error.add_note(error.traceback)
                    raise
            self.signature, self.config = self._core.signature(self.name, ""), self._core.config(self.name, "")
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unload the model, which calls its ``finalize``."""
        self._stack.close()

    def __call__(self, **inputs: Any) -> Any:
        """As ``run``, with inputs as keywords."""
        return self.run(inputs)

    def run(self, inputs: Mapping[str, Any], **options: Unpack[RunOptions]) -> Any:
        """The ``Response`` to one request; if the model is decoupled, the list of them."""
        (answer,) = self.batch([inputs], **options)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def batch(self, requests: Sequence[Mapping[str, Any]], **options: Unpack[RunOptions]) -> list[Any]:
        """The answers to requests that come at once, in order; what ``run`` would raise is in the list.

        As in a service, the batching of the configuration says which of them share an execution.
        """

        async def ask(inputs: Mapping[str, Any]) -> Any:
            context, results = self._begun(inputs, options)
            try:
                responses = [Response(one) async for one in results]
            except WeftError as error:
                return context.error(error)
            return responses if self.signature.is_decoupled else responses[0]

        async def ask_all() -> list[Any]:
            return await asyncio.gather(*map(ask, requests))

        return self._thread.result(ask_all())

    def start(self, inputs: Mapping[str, Any], **options: Unpack[RunOptions]) -> "Call":
        """Begin with one request, to read its responses as they come, or to leave."""
        return Call(self._thread, *self._begun(inputs, options))

    def _begun(
        self, inputs: Mapping[str, Any], options: RunOptions
    ) -> tuple[_Context, AsyncGenerator[InferResult, None]]:
        call, given = request_of(self.signature, inputs, **options)
        context = _Context(given.deadline_ns, given.headers)
        return context, self._core.stream_infer(call, context)

    async def _started(self, folder: Path, models: Mapping[str, Any]) -> _Core:
        given = {name: one for name, one in models.items() if not isinstance(one, Tested)}
        core = _Core(folder, {name: one if isinstance(one, Fake) else fake(one) for name, one in given.items()})
        await core.start()
        return core


class Call(Iterator[Response]):
    """One request on its way: iterates over its responses, and raises what ``TestedModel.run`` would."""

    def __init__(self, thread: LoopThread, context: _Context, results: AsyncGenerator[InferResult, None]) -> None:
        self._thread, self._context, self._results = thread, context, results
        self._next = thread.begin(self._following())

    @override
    def __next__(self) -> Response:
        try:
            result = self._next.result()
        except WeftError as error:
            raise self._context.error(error) from None
        except CancelledError:
            result = None
        if result is None:
            raise StopIteration
        self._next = self._thread.begin(self._following())
        return Response(result)

    def cancel(self) -> None:
        """Leave as a client does, once the model executes the request; return when ``execute`` has returned.

        Raises TimeoutError: The model does not begin, or does not end, within a minute.
        """
        if not self._context.has_begun.wait(_LIMIT_S):
            raise TimeoutError("the model has not begun with the request")
        if not self._next.cancel():
            self._thread.result(self._results.aclose())
        if not self._context.has_ended.wait(_LIMIT_S):
            raise TimeoutError("execute goes on though its client has left; ask request.is_cancelled()")

    async def _following(self) -> InferResult | None:
        try:
            return await anext(self._results, None)
        except asyncio.CancelledError:
            await self._results.aclose()
            raise


def _placed(tested: Tested, folder: Path, name: str = "") -> str:
    """Put a model into the repository ``folder``, by links; returns its name."""
    if isinstance(tested, Model):
        tested.write(folder)
        return tested.name
    path = Path(tested).absolute()
    if path.is_dir() and not (path / FILENAME).is_file():
        (folder / (name or path.name)).symlink_to(path)
        return name or path.name
    if not path.exists():
        raise NotFoundError(f"there is no {path}; give a model.py, or the folder of a model")
    version = path if path.is_dir() else path.parent
    around = version.parent if is_version(version.name) else version
    place = folder / (name or around.name)
    place.mkdir()
    for one in filter(Path.is_file, around.iterdir()):  # its configuration, and labels
        (place / one.name).symlink_to(one)
    (place / (version.name if version is not around else "1")).symlink_to(version)
    return place.name


model = TestedModel
