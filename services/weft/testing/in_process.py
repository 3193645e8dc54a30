"""Runs a ``model.py`` in this process, on the queue, batcher and instances by which services run it."""

import asyncio
import contextlib
import tempfile
import threading
import time
from collections import ChainMap
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from google.protobuf import json_format
from typing_extensions import override

from weft.authoring.fakes import Fake, responses_of
from weft.authoring.model import Model
from weft.base.core import CallContext, InferCall, InferResult, Parameters, RequestedOutput
from weft.base.errors import NotFoundError, WeftError
from weft.base.repository.layout import CONFIG_FILENAME, existing_file, is_version
from weft.base.tensors import decode, encode, tensor_of
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

#: How long ``Call.cancel`` waits for the model to begin and to end, in seconds.
CANCEL_LIMIT_S = 60.0
#: A folder or ``model.py``, or ``@weft.model``; for models that are called, also ``weft.fake(...)``.
Tested = str | Path | Model


@dataclass(frozen=True)
class Request:
    """One request: inputs by name, arrays or what becomes one, and what else a client may send with it."""

    inputs: Mapping[str, Any]
    parameters: Parameters = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    outputs: Iterable[str] = ()
    request_id: str = ""
    timeout_ms: float | None = None


class Response(Answer):
    """Outputs by name, as item or attribute.

    Attributes:
        is_final: It is the last one; without outputs where the model told so after them.
        error: Of a response of a decoupled model that others may follow; None if it has outputs.
    """

    def __init__(self, result: InferResult) -> None:
        super().__init__(result, {})
        self.is_final, self.error = result.is_final, result.error


@dataclass(slots=True)
class _Context(CallContext):
    """The context of a test's request, and what the model did with it."""

    has_begun: threading.Event = field(default_factory=threading.Event)
    has_ended: threading.Event = field(default_factory=threading.Event)
    raised: BaseException | None = None
    raised_at: TracebackType | None = None

    def error(self, told: WeftError) -> BaseException:
        """What the model raised, with the traceback from its first frame on; else what clients are told."""
        return told if self.raised is None else self.raised.with_traceback(self.raised_at)


class _InProcessBackend(PythonBackend):
    """On a thread of this process, where it also completes its configuration."""

    @staticmethod
    def auto_complete(config: dict[str, Any], directory: Path) -> dict[str, Any]:  # type: ignore[override]
        path = existing_file(directory, config.get("default_model_filename") or FILENAME)
        return complete_config(config, path.resolve())

    execution_modes = ("thread", "process", "inline")

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        parameters = {key: value for key, value in model.parameters.items() if key != ENVIRONMENT}
        super().__init__(replace(model, directory=model.directory.resolve(), parameters=parameters), instance)

    @override
    @classmethod
    def is_remote(cls, model: ModelContext) -> bool:
        return False

    @override
    def execute(self, batch: Batch) -> list[Outcome]:
        contexts = [one.context for one in batch.requests if isinstance(one.context, _Context)]
        for context in contexts:
            context.has_begun.set()
        try:
            return super().execute(batch)
        except BaseException as error:
            place = error.__traceback__
            while place and place.tb_next and place.tb_frame.f_globals["__name__"].startswith("weft."):
                place = place.tb_next
            for context in contexts:
                context.raised, context.raised_at = error, place
            raise
        finally:
            for context in contexts:
                context.has_ended.set()


class _Callee:
    """Answers the calls that a model makes: by fakes, else by the models of the core."""

    def __init__(self, fakes: Mapping[str, Any]) -> None:
        self._fakes = fakes
        self.core: ServingCore | None = None

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """The answer to one call."""
        if call.model_name not in self._fakes:
            return await self._found(call).infer(call, context)
        async with contextlib.aclosing(self.stream_infer(call, context)) as results:
            return await anext(results)

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """The answers to one call."""
        if call.model_name not in self._fakes:
            async for result in self._found(call).stream_infer(call, context):
                yield result
            return
        fake = self._fakes[call.model_name]
        answer = fake.answer if isinstance(fake, Fake) else fake
        if isinstance(answer, BaseException):
            raise answer
        inputs = {name: decode(tensor, name=name) for name, tensor in call.inputs.items()}
        if isinstance(fake, Fake):
            fake.calls.append(inputs)
        async for outputs in responses_of(answer, inputs):
            tensors = {name: encode(np.asarray(value)) for name, value in outputs.items()}
            yield InferResult(call.model_name, "1", call.request_id, outputs=tensors, is_final=False)

    def _found(self, call: InferCall) -> ServingCore:
        core = self.core
        if core is None or all(entry.name != call.model_name for entry in core.index(ready_only=True)):
            name = call.model_name
            raise NotFoundError(f"the model calls '{name}'; give models={{'{name}': weft.fake(...) or its folder}}")
        return core


class TestedModel:
    """A loaded model, for a ``with`` block or until ``close``; it is called from one thread at a time.

    Attributes:
        name, signature, config: Of the model, completed as at load.
    """

    __test__ = False  # it is no class of tests

    def __init__(self, tested: Tested, models: Mapping[str, Any], config: str) -> None:
        self._stack = contextlib.ExitStack()
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="weft-testing", daemon=True)
        thread.start()
        self._stack.callback(self._loop.close)
        self._stack.callback(thread.join)
        self._stack.callback(self._loop.call_soon_threadsafe, self._loop.stop)
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-testing-")))
            placed = {name: _placed(one, folder, name) for name, one in models.items() if isinstance(one, Tested)}
            self.name = _placed(tested, folder)
            self._core = self._result(self._start(folder, {k: v for k, v in models.items() if k not in placed}))
            self._stack.callback(lambda: self._result(self._core.close(grace_s=CANCEL_LIMIT_S)))
            for name in (*placed, self.name):
                given = {"config": _json_of(config)} if config and name == self.name else {}
                self._result(self._core.load(name, given))
        except BaseException as error:
            self._stack.close()
            if isinstance(error, WeftError) and error.traceback:
                error.add_note(error.traceback)
            raise
        self.signature, self.config = self._core.signature(self.name, ""), self._core.config(self.name, "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unload the model, which calls its ``finalize``."""
        self._stack.close()

    def __call__(self, inputs: Request | Mapping[str, Any] | None = None, /, **arrays: Any) -> Any:
        """The response to one request; the list of them if the model is decoupled.

        Raises what ``execute`` raised, with its traceback; else the WeftError that clients get.
        """
        (answer,) = self.batch([arrays if inputs is None else inputs])
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def batch(self, requests: Sequence[Request | Mapping[str, Any]]) -> list[Any]:
        """The answers to requests that come at once, in their order; what a call would raise is in the list.

        As in a service, those share an execution that the batching of the configuration lets share one.
        """

        async def ask(request: Request | Mapping[str, Any]) -> Any:
            context = _Context()
            try:
                call = self._call_of(request, context)
                responses = [Response(one) async for one in self._core.stream_infer(call, context)]
            except WeftError as error:
                return context.error(error)
            return responses if self.signature.is_decoupled else responses[0]

        async def ask_all() -> list[Any]:
            return await asyncio.gather(*map(ask, requests))

        return self._result(ask_all())

    def start(self, inputs: Request | Mapping[str, Any] | None = None, /, **arrays: Any) -> "Call":
        """Begin one request, to read its responses one by one, or to cancel it."""
        context = _Context()
        call = self._call_of(arrays if inputs is None else inputs, context)
        return Call(self, self._core.stream_infer(call, context), context)

    def _call_of(self, given: Request | Mapping[str, Any], context: _Context) -> InferCall:
        request = given if isinstance(given, Request) else Request(given)
        specs, has_batch = {spec.name: spec for spec in self.signature.inputs}, self.signature.max_batch_size > 0
        if request.timeout_ms is not None:
            context.deadline_ns = time.monotonic_ns() + int(request.timeout_ms * 1e6)
        context.headers = {key.lower(): value for key, value in request.headers.items()}
        tensors = {
            name: tensor_of(value, specs[name].datatype, specs[name].dims, name=name, has_batch=has_batch)
            if name in specs
            else encode(np.asarray(value))  # it is refused by its name
            for name, value in request.inputs.items()
        }
        outputs = tuple(RequestedOutput(name, {}) for name in request.outputs)
        return InferCall(self.name, "", request.request_id, request.parameters, tensors, outputs)

    async def _start(self, folder: Path, fakes: Mapping[str, Any]) -> ServingCore:
        callee = _Callee(fakes)
        backends: Any = ChainMap({"python": _InProcessBackend}, *BACKENDS.values())  # type: ignore[arg-type]  # read only
        callee.core = ServingCore(folder, backends, model_control="explicit", callee=callee)
        await callee.core.start()
        return callee.core

    def _submit(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _result(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._submit(work).result()


class Call(Iterator[Response]):
    """One request on its way; iterates over its responses, and raises what a call of the model would."""

    def __init__(self, tested: TestedModel, results: AsyncGenerator[InferResult, None], context: _Context) -> None:
        self._tested, self._results, self._context = tested, results, context
        self._next = tested._submit(self._following())

    def __next__(self) -> Response:
        try:
            result = self._next.result()
        except WeftError as error:
            raise self._context.error(error) from None
        except CancelledError:
            result = None
        if result is None:
            raise StopIteration
        self._next = self._tested._submit(self._following())
        return Response(result)

    def cancel(self) -> None:
        """Leave, as a client does, once the model executes the request; return when ``execute`` has returned.

        Raises TimeoutError: That takes longer than ``CANCEL_LIMIT_S``.
        """
        if not self._context.has_begun.wait(CANCEL_LIMIT_S):
            raise TimeoutError(f"model '{self._tested.name}' did not begin with the request")
        if not self._next.cancel():
            self._tested._result(self._results.aclose())
        if not self._context.has_ended.wait(CANCEL_LIMIT_S):
            raise TimeoutError(f"execute of '{self._tested.name}' goes on; ask request.is_cancelled()")

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
    version = path.parent if path.is_file() else path
    if path.is_dir() and not (version / FILENAME).is_file():
        (folder / (name or path.name)).symlink_to(path)
        return name or path.name
    if not path.exists():
        raise NotFoundError(f"there is no {path}; give a model.py, or the folder of a model")
    around = version.parent if is_version(version.name) else version
    place = folder / (name or around.name)
    place.mkdir()
    for one in filter(Path.is_file, around.iterdir()):
        (place / one.name).symlink_to(one)
    (place / (version.name if is_version(version.name) else "1")).symlink_to(version)
    return place.name


def _json_of(config: str) -> str:
    return json_format.MessageToJson(
        parse(config, ModelConfig(), file=CONFIG_FILENAME)[0], preserving_proto_field_name=True
    )


def model(tested: Tested, models: Mapping[str, Any] | None = None, *, config: str = "") -> TestedModel:
    """Load a Python model in this process, without a server::

        with weft.testing.model("model_repository/model/top2") as top2:
            assert top2(PROBS=probs).FIRST.tolist() == [[3, 1]]

    Args:
        tested: A ``model.py``, the folder of a model or of its version, or an ``@weft.model``.
        models: What it may call, by name: ``weft.fake(...)``, a function of the inputs, or a folder as ``tested``.
        config: Text of a ``config.pbtxt`` in place of its own.

    Raises:
        WeftError: It cannot be loaded, for the reason that a service would log.
    """
    return TestedModel(tested, models or {}, config)
