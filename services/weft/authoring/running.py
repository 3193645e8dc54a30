"""Runs a graph in this process, on the executor of the router, with fakes or the real models behind it.

It is what ``weft edge`` serves, without its ports: a router over cores in one process. So answers, paths and errors are
those of a server.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias, TypedDict, TypeVar, Unpack, cast

from typing_extensions import override

from weft.authoring.fakes import Fake, FakeCore
from weft.authoring.model import Model
from weft.authoring.steps import with_called
from weft.base.core import CallContext, InferCall, InferenceCore, InferResult, Parameters, RequestedOutput
from weft.base.errors import InvalidArgumentError, NotFoundError, RemoteError
from weft.base.processes.loop_thread import LoopThread
from weft.base.repository.layout import folders_of_models, model_names
from weft.base.signature import ModelSignature
from weft.base.tensors import WireTensor, tensor_of
from weft.base.text.suggestion import suggestion
from weft.language.syntax.file import GraphSource, ModelCatalog
from weft.mesh.fused import FusedCore
from weft.router.compile import names_called
from weft.router.targets.in_process import InProcessTarget
from weft.serving.calls import Callee
from weft.serving.config import CONFIG_FILENAME
from weft.serving.core import ServingCore
from weft.tools.offline import BACKENDS, GRAPH_FILENAME, GRAPH_FOLDER, model_folders
from weft.v2.client.answer import PATH_HEADER, TRACE_PARAMETER, Answer

#: How long models may take to end their requests when a graph is closed, in seconds.
_GRACE_S = 5.0
T = TypeVar("T")
#: By the name of a model, what is used in its place.
Stands: TypeAlias = Mapping[str, Fake | Model] | None


class RunOptions(TypedDict, total=False):
    """What a request has besides inputs, as in a request to a server; ``timeout_ms`` is its deadline."""

    parameters: Parameters
    headers: Mapping[str, str]
    timeout_ms: float
    outputs: Iterable[str]
    request_id: str


def stage(things: Sequence[Any], repository: Path | None, folder: Path, but: Collection[str] = ()) -> set[str]:
    """Make a repository in ``folder``: graphs and models in Python, what they call, and links to other models.

    Args:
        things: Graphs and models; of two with one name the first counts.
        repository: Where the other models are.
        but: Names of models that are not needed.

    Returns:
        Names of models that the graphs reach, and of what there is not. Raises GraphError or OSError.
    """
    (folder / GRAPH_FOLDER).mkdir()
    graphs = dict[str, Any]()
    for one in with_called(things):
        if not isinstance(one, Model):
            graphs.setdefault(one.source.name, one)
        elif one.name not in but and not (folder / "model" / one.name).exists():
            one.write(folder / "model")
    if repository is not None:
        for service, place in (folders_of_models(repository, tuple(BACKENDS)) or {"model": repository}).items():
            (folder / service).mkdir(exist_ok=True)
            for name in model_names(place):
                if not (folder / service / name).exists():
                    (folder / service / name).symlink_to((place / name).resolve())
    reached = set[str]()
    for graph in graphs.values():
        sources = {graph.source.name: graph.source}
        while sources:
            name, source = sources.popitem()
            _place(source, folder / GRAPH_FOLDER / name)
            for called in names_called(source) - reached:
                reached.add(called)
                if graph.graphs is not None and (found := graph.graphs.find(called, "")) is not None:
                    sources[called] = found
    return {name for name in reached if not (folder / GRAPH_FOLDER / name).exists()}


def _place(source: GraphSource, place: Path) -> None:
    """Link to the folder of a graph's file, which may have labels too, or write its text if there is no such file."""
    file, text = Path(source.file), source.text.encode() if isinstance(source.text, str) else source.text
    if place.exists():
        return
    if file.is_file() and file.read_bytes() == text:
        place.symlink_to((file.parent if file.name == CONFIG_FILENAME else file.parents[1]).resolve())
        return
    (place / source.version).mkdir(parents=True)
    (place / source.version / GRAPH_FILENAME).write_bytes(text)


class _LazyCore(FusedCore):
    """Also loads models that no graph names but other models call, on their first request.

    Rollouts stay at their first share: requests of tests and replays are no evidence.
    """

    @override
    async def start(self) -> None:
        await super().start()
        self._rollouts.hold()

    @override
    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        if self._catalog.entry(call.model_name, "") is None and await self._service_of(call.model_name):
            await self.load(call.model_name, {})
        return await super().infer(call, context)


class LoadedGraph:
    """A graph with its models, loaded for a ``with`` block, on a thread of its own, or for an ``async with`` block.

    Args:
        models: By name, ``weft.fake(...)`` or models made in Python; the others that the graph reaches are those of its
            repository.

    Attributes:
        target: Answers calls as they are.

    Raises:
        WeftError: The graph or a model cannot be loaded, or there is no model of a fake's name.
        ValueError: A fake does not give what its model gives.
    """

    def __init__(self, graph: Any, models: Stands = None) -> None:
        self._graph = graph
        models = models or {}
        self._made = [one for one in models.values() if isinstance(one, Model)]
        self._fakes = {name: one for name, one in models.items() if not isinstance(one, Model)}
        self._thread: LoopThread | None = None

    async def __aenter__(self) -> Self:
        name = self._graph.source.name
        async with contextlib.AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-run-")))
            makers, fakes = await asyncio.to_thread(self._prepare, folder)
            self._faults, target = fakes.faults, InProcessTarget("fakes", cast(InferenceCore, fakes))
            graphs = folder / GRAPH_FOLDER
            core = _LazyCore(makers, graphs, [target], model_control="explicit", load_graphs=[name])
            stack.push_async_callback(core.close, grace_s=_GRACE_S)
            self.target = InProcessTarget("graph", core, service="weft.router")
            stack.push_async_callback(self.target.close)
            await core.start()
            self._signature = core.signature(name, "")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def __enter__(self) -> Self:
        self._thread = LoopThread("weft-run")
        try:
            return self._result(self.__aenter__())
        except BaseException:
            self._thread.stop()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._result(self.__aexit__())
        finally:
            self._thread, thread = None, self._thread
            if thread is not None:
                thread.stop()

    def _result(self, work: Coroutine[Any, Any, T]) -> T:
        if self._thread is None:
            work.close()
            raise RuntimeError("the graph is not loaded: run it in its `with` block; in an `async with`, by run_async")
        return self._thread.result(work)

    def _prepare(self, folder: Path) -> tuple[dict[str, Callable[[Callee], ServingCore]], FakeCore]:
        repository = getattr(self._graph.catalog, "repository", None) or None  # "": models of Python alone
        reached = stage([*self._made, self._graph], repository, folder, but=self._fakes)
        places = model_folders(folder)
        fakes = FakeCore({name: (one, self._signature_of(name, one)) for name, one in self._fakes.items()})
        makers: dict[str, Callable[[Callee], ServingCore]] = {}
        for service in {service for service, _ in places.values()}:
            names = [name for name in reached - self._fakes.keys() if places.get(name, ("",))[0] == service]
            makers[service] = partial(_made_core, folder / service, names)
        return makers, fakes

    def _signature_of(self, name: str, one: Fake) -> ModelSignature:
        if not isinstance(one, Fake):
            kind = type(one).__name__
            raise InvalidArgumentError(f"models['{name}'] is of type {kind}; give weft.fake(...) or a @weft.model")
        catalog: ModelCatalog | None = self._graph.catalog
        if catalog is not None and (known := catalog.find(name, "")) is not None:
            return known[1]
        hint = suggestion(name, catalog.names() if catalog is not None else ())
        raise NotFoundError(f"models: there is no model '{name}' that a fake could stand for{hint}")

    def run(self, inputs: Mapping[str, Any], **options: Unpack[RunOptions]) -> Answer:
        """Answer one request, in a ``with`` block; see ``Graph.run``."""
        return self._result(self.run_async(inputs, **options))

    async def run_async(self, inputs: Mapping[str, Any], **options: Unpack[RunOptions]) -> Answer:
        """Answer one request, in an ``async with`` block. Cancelling the awaiting task cancels the request."""
        call, context = self._request(inputs, **options)
        with self._telling(context) as trailing:
            return Answer(await self.target.infer(call, context), trailing)

    def stream(self, inputs: Mapping[str, Any], **options: Unpack[RunOptions]) -> Generator[Answer, None, None]:
        """Yield the responses to one request, in a ``with`` block; closing the generator cancels it."""
        return self._each(self.stream_async(inputs, **options))

    async def stream_async(
        self, inputs: Mapping[str, Any], **options: Unpack[RunOptions]
    ) -> AsyncGenerator[Answer, None]:
        """As ``stream``, in an ``async with`` block."""
        call, context = self._request(inputs, **options)
        with self._telling(context) as trailing:
            async with contextlib.aclosing(self.target.stream_infer(call, context)) as results:
                async for result in results:
                    answer = Answer(result, trailing)
                    if not result.is_null and (result.outputs or not result.is_final):
                        yield answer

    def ask(self, call: InferCall, context: CallContext) -> Generator[InferResult, None, None]:
        """Yield the responses to a call of a model that the graph reaches, in a ``with`` block."""
        return self._each(self.target.stream_infer(call, context))

    def _each(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        async def following() -> T | None:
            return await anext(items, None)

        try:
            while (item := self._result(following())) is not None:
                yield item
        finally:
            if self._thread is not None:  # else it was closed with the graph
                self._thread.result(items.aclose())

    def _request(self, inputs: Mapping[str, Any], **options: Unpack[RunOptions]) -> tuple[InferCall, CallContext]:
        call, context = request_of(self._signature, inputs, **options)
        call.parameters = {TRACE_PARAMETER: True, **call.parameters}
        return call, context

    @contextlib.contextmanager
    def _telling(self, context: CallContext) -> Generator[dict[str, str], None, None]:
        """Trailing metadata, complete at the end; the fault of a fake is raised in place of what came of it."""
        trailing: dict[str, str] = {}
        try:
            yield trailing
        except RemoteError as error:
            error.path = dict(context.trailing_metadata).get(PATH_HEADER, "")
            raise error.of_its_class() from error.__cause__
        finally:
            trailing.update(context.trailing_metadata)
            if self._faults:
                raise self._faults.pop() from None


def _made_core(folder: Path, models: Sequence[str], callee: Callee) -> ServingCore:
    backends = BACKENDS[folder.name]
    return ServingCore(folder, backends, model_control="explicit", load_models=models, callee=callee)


def request_of(
    signature: ModelSignature,
    inputs: Mapping[str, Any],
    *,
    parameters: Parameters | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_ms: float | None = None,
    outputs: Iterable[str] = (),
    request_id: str = "",
) -> tuple[InferCall, CallContext]:
    """A request to a graph or model of this process. Raises InvalidArgumentError for what is no tensor."""
    if not isinstance(inputs, Mapping):
        raise InvalidArgumentError(f"inputs are a dict with a value for each input, got {type(inputs).__name__}")
    specs, has_batch = {spec.name: spec for spec in signature.inputs}, signature.max_batch_size > 0
    tensors = {
        name: tensor_of(value, specs[name].datatype, specs[name].dims, name=name, has_batch=has_batch)
        if name in specs
        else WireTensor("BYTES", (0,), b"")  # it is refused by its name
        for name, value in inputs.items()
    }
    asked = tuple(RequestedOutput(name, {}) for name in outputs)
    deadline_ns = None if timeout_ms is None else time.monotonic_ns() + int(timeout_ms * 1e6)
    headers = {name.lower(): value for name, value in (headers or {}).items()}
    call = InferCall(signature.name, "", request_id, parameters or {}, tensors, asked)
    return call, CallContext(deadline_ns, headers)
