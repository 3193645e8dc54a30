"""Random decoupled graphs: the compiler takes those whose tensors follow one stream, and these run as they read."""

import random
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall, InferResult, RequestedOutput
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import bytes_tensor, split_bytes
from weft.language import GraphSource
from weft.router.compile import check_graph, compile_graph
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime

NUM_GRAPHS = 400
TEXTS = "data_type: TYPE_STRING dims: [ 1 ]"


@dataclass(frozen=True)
class Drawn:
    """A graph: for each step whether it is decoupled and which steps it reads (-1: the graph's input)."""

    steps: tuple[tuple[bool, tuple[int, ...]], ...]
    outputs: tuple[int, ...]
    limit: int

    def model(self, index: int) -> str:
        """``plain_<number of inputs>_<index>`` or ``stream_...``."""
        is_decoupled, reads = self.steps[index]
        return f"{'stream' if is_decoupled else 'plain'}_{len(reads)}_{index}"

    def text(self) -> str:
        """The file."""
        tensor = [*(f"t{i}" for i in range(len(self.steps))), "X"]
        outputs = ", ".join(f'{{ name: "t{i}" {TEXTS} }}' for i in self.outputs)
        steps = "\n".join(
            f'step {{ name: "s{i}" model_name: "{self.model(i)}" output_map {{ key: "OUT" value: "t{i}" }} '
            + " ".join(f'input_map {{ key: "I{k}" value: "{tensor[read]}" }}' for k, read in enumerate(reads))
            + " }"
            for i, (_, reads) in enumerate(self.steps)
        )
        is_decoupled = any(self.steps[i][0] for i in self.behind(self.outputs))
        limit = f"max_inflight_responses: {self.limit}" if is_decoupled else ""
        return f"""name: "g" platform: "graph" input [ {{ name: "X" {TEXTS} }} ] output [ {outputs} ]
node {{ name: "root" sequence {{ {limit} {steps} }} }}"""

    def labels(self, index: int) -> set[int]:
        """The stream that a step's tensor belongs to; several if it joins them, none if it comes once or never."""
        if index == -1:
            return set()
        is_decoupled, reads = self.steps[index]
        if is_decoupled and index in self.behind(self.outputs):
            return {index}
        return set().union(*(self.labels(read) for read in reads))

    def follows_one_stream(self) -> bool:
        """The rule: no step joins streams that run, and all outputs that follow a stream follow the same."""
        joined = [set().union(*(self.labels(read) for read in reads)) for _, reads in self.steps]
        return all(len(labels) <= 1 for labels in (*joined, self.streams()))

    def streams(self) -> set[int]:
        """Streams that the outputs follow."""
        return set().union(*(self.labels(i) for i in self.outputs))

    def behind(self, indexes: Iterable[int]) -> set[int]:
        """These steps, and all that they depend on."""
        reads = {read for i in indexes for read in self.steps[i][1]} - {-1}
        return {*indexes, *(self.behind(reads) if reads else ())}

    def responses(self, *asked: int) -> Iterator[list[str]]:
        """What the graph says of each of these steps in each response, by definition."""
        chain = sorted(i for i in self.behind(asked) if self.steps[i][0])
        for known in self._numbered(chain, {}):
            yield [self._value(i, known) for i in asked]

    def _numbered(self, chain: list[int], known: Mapping[int, int]) -> Iterator[Mapping[int, int]]:
        if not chain:
            yield known
            return
        for number in range(num_responses(self._said(chain[0], known))):
            yield from self._numbered(chain[1:], {**known, chain[0]: number})

    def _value(self, index: int, known: Mapping[int, int]) -> str:
        if index == -1:
            return "x"
        said = self._said(index, known)
        return f"{said}#{known[index]}" if self.steps[index][0] else said

    def _said(self, index: int, known: Mapping[int, int]) -> str:
        return said(self.model(index), [self._value(read, known) for read in self.steps[index][1]])


def said(model: str, inputs: list[str]) -> str:
    return f"{model}({','.join(inputs)})"


def num_responses(text: str) -> int:
    """Of a stream that says ``text``: 0 to 3."""
    return sum(text.encode()) % 4


def drawn(seed: int) -> Drawn:
    generator = random.Random(seed)
    steps = tuple(
        (generator.random() < 0.35, tuple(generator.choices(range(-1, i), k=generator.randint(1, 2))))
        for i in range(generator.randint(1, 6))
    )
    outputs = generator.sample(range(len(steps)), generator.randint(1, min(2, len(steps))))
    return Drawn(steps, tuple(sorted(outputs)), generator.randint(1, 3))


class Catalog:
    """Every model that a graph names."""

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature]:
        kind, num_inputs, _ = model_name.split("_")
        inputs = tuple(TensorSpec(f"I{i}", "BYTES", (1,)) for i in range(int(num_inputs)))
        outputs = (TensorSpec("OUT", "BYTES", (1,)),)
        return "model", ModelSignature(model_name, "1", "", 0, inputs, outputs, is_decoupled=kind == "stream")

    def names(self) -> list[str]:
        return []


def streaming_target() -> Any:
    """A target on which a model says its name and its inputs, a decoupled one several times with a number behind."""

    async def answer(call: InferCall, context: CallContext) -> InferResult:
        text = said(call.model_name, [split_bytes(call.inputs[name].data)[0].decode() for name in sorted(call.inputs)])
        return InferResult(call.model_name, "1", outputs={"OUT": bytes_tensor([text], (1,))})

    class StreamingTarget(FakeTarget):
        async def infer(self, call: InferCall, context: CallContext) -> InferResult:
            return await answer(call, context)

        async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
            whole = (await answer(call, context)).outputs["OUT"]
            text = split_bytes(whole.data)[0].decode()
            for number in range(num_responses(text)):
                outputs = {"OUT": bytes_tensor([f"{text}#{number}"], (1,))}
                yield InferResult(call.model_name, "1", outputs=outputs, is_final=False)
            yield InferResult(call.model_name, "1", is_null=True)

    return StreamingTarget()


async def answers(executor: GraphExecutor, *outputs: str) -> list[list[str]]:
    """What a graph says of x: the outputs in each response."""
    asked = tuple(RequestedOutput(output, {}) for output in outputs)
    call = InferCall("g", inputs={"X": bytes_tensor(["x"], (1,))}, outputs=asked)
    if executor.plan.signature.is_decoupled:
        results = [result async for result in executor.stream(call, CallContext()) if not result.is_null]
    else:
        results = [await executor.execute(call, CallContext())]
    return [[split_bytes(result.outputs[name].data)[0].decode() for name in outputs] for result in results]


async def test_what_follows_one_stream_is_taken_and_runs_as_it_reads() -> None:
    """Of random graphs the others are refused (G019); responses, their order and their tensors are as defined."""
    num_taken = num_streaming = 0
    for seed in range(NUM_GRAPHS):
        graph = drawn(seed)
        source = GraphSource(graph.text(), "g.pbtxt", "g", "1")
        codes = {one.code for one in check_graph(source, Catalog()) if one.severity == "error"}
        assert (set() if graph.follows_one_stream() else {"G019"}) == codes, graph
        if codes:
            continue
        executor = GraphExecutor(compile_graph(source, Catalog()), Runtime({"model": streaming_target()}))
        expected = list(graph.responses(*graph.outputs))
        assert expected == await answers(executor, *(f"t{i}" for i in graph.outputs)), graph
        steps = sorted(graph.behind(graph.outputs))
        chosen = random.Random(seed).sample(steps, random.Random(seed).randint(1, len(steps)))
        assert list(graph.responses(*chosen)) == await answers(executor, *(f"s{i}/OUT" for i in chosen)), graph
        num_taken += 1
        num_streaming += len(expected) != 1
        assert 0 == make.num_other_tasks()
    assert (num_taken > NUM_GRAPHS // 2, num_streaming > NUM_GRAPHS // 10) == (True, True)
