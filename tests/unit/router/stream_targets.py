"""Decoupled plans built by hand, a target with scripted streams, and what comes of them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall, InferResult, RequestedOutput
from weft.base.errors import WeftError
from weft.base.signature import ModelSignature
from weft.language import GraphSource
from weft.language.plan import GraphPlan
from weft.language.syntax.file import GraphLookup
from weft.router.compile import compile_graph
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.runtime import Runtime

HEADER = """
name: "g" platform: "graph"
input  [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
Script = Callable[[InferCall, CallContext], AsyncIterator[Any]]


def stream_target() -> Any:
    """A fake target whose `streams` have the scripts of decoupled models; a script yields tensors or whole results."""

    class StreamTarget(FakeTarget):
        def __init__(self) -> None:
            super().__init__()
            self.streams: dict[str, Script] = {}
            self.num_made = 0
            self.has_made = asyncio.Event()

        async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
            self.calls.append(call)
            self.contexts.append(context)
            self.num_open += 1
            try:
                async with aclosing(self.streams[call.model_name](call, context)) as answers:  # type: ignore[type-var]
                    async for answer in answers:
                        self.num_made += 1
                        self.has_made.set()
                        is_whole = isinstance(answer, InferResult)
                        name = call.model_name
                        yield answer if is_whole else InferResult(name, "1", outputs={"OUT": answer}, is_final=False)
            except (asyncio.CancelledError, GeneratorExit):
                self.cancelled.append(call.model_name)
                raise
            finally:
                self.num_open -= 1
            yield InferResult(call.model_name, "1", call.request_id, is_null=True)

    return StreamTarget()


class StreamModels:
    """Signatures of models that take IN and give OUT; those of one letter are decoupled, and collect all but `z`."""

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature]:
        """As `Catalog.find`."""
        signature = make.signature(model_name, [make.spec("IN", dims=(2, -1) if model_name == "judge" else (-1,))])
        is_decoupled = len(model_name) == 1
        return "model", replace(signature, is_decoupled=is_decoupled, can_collect=is_decoupled and model_name != "z")

    def names(self) -> list[str]:
        """As `Catalog.names`."""
        return []


def compiled(text: str, graphs: GraphLookup | None = None) -> GraphPlan:
    """The plan of a graph of IN and OUT with these nodes."""
    return compile_graph(GraphSource(HEADER + text, "graph.pbtxt"), StreamModels(), graphs)


class Plans:
    """Builders of decoupled plans; every model takes IN and gives OUT."""

    def stream(self, name: str, tensor: str, output: str, **options: Any) -> Any:
        """A step that calls a decoupled model."""
        call = make.call_plan(name, ["IN"], ["OUT"])
        call = replace(call, signature=replace(call.signature, is_decoupled=True))
        return make.step(name, call, {"IN": tensor}, {"OUT": output}, **options)

    def step(self, name: str, tensor: str, output: str, **options: Any) -> Any:
        """A step that calls any other model."""
        return make.step(name, name, {"IN": tensor}, {"OUT": output}, **options)

    def graph(self, *steps: Any, outputs: Any = ("Y",), max_inflight_responses: int = 0, **options: Any) -> GraphPlan:
        """A graph of X with these steps."""
        root = make.node("root", SequencePlan, steps, inputs=["X"], outputs=outputs)
        assert isinstance(root, SequencePlan)
        root = replace(root, max_inflight_responses=max_inflight_responses)
        plan = make.graph(root, **options)
        return replace(plan, signature=replace(plan.signature, is_decoupled=True))

    def chat(self, **options: Any) -> GraphPlan:
        """Three steps: pre -> llm (decoupled) -> post."""
        return self.graph(
            self.step("pre", "X", "p"), self.stream("llm", "p", "t"), self.step("post", "t", "Y"), **options
        )


def counting(count: int, failure: WeftError | None = None) -> Script:
    """A stream of 1, 2, ..., `count`, which then ends or fails."""

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        for number in range(1, count + 1):
            yield make.tensor(number)
        if failure is not None:
            raise failure

    return script


def stream_of(
    plan: GraphPlan | GraphExecutor,
    target: FakeTarget,
    *,
    outputs: tuple[str, ...] = (),
    context: CallContext | None = None,
    **options: Any,
) -> AsyncGenerator[InferResult, None]:
    """The responses of a graph whose input, X or IN, is 0."""
    executor = plan if isinstance(plan, GraphExecutor) else GraphExecutor(plan, Runtime({"model": target}))
    call = InferCall(
        "g",
        "",
        "r",
        inputs={name: make.tensor(0) for name, _ in executor.plan.root.inputs},
        outputs=tuple(RequestedOutput(o, {}) for o in outputs),
        **options,
    )
    return executor.stream(call, context if context is not None else CallContext())


async def collected(results: AsyncGenerator[InferResult, None]) -> tuple[list[InferResult], WeftError | None]:
    """Everything that comes, and the error at the end."""
    got: list[InferResult] = []
    try:
        async for result in results:
            got.append(result)
    except WeftError as error:
        return got, error
    return got, None


def numbers(results: list[InferResult], output: str = "Y") -> list[float | None]:
    """Value of an output in each response but the last."""
    tensors = [result.outputs.get(output) for result in results if not result.is_null]
    return [next((n for n in range(-9, 99) if tensor == make.tensor(n)), None) for tensor in tensors]
