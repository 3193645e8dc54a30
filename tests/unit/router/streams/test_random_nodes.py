"""Random graphs of nodes inside nodes, some of which stream: their responses, order and end are as defined."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.streams.test_label_rule import TEXTS, Catalog, num_responses, said, streaming_target

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError
from weft.base.tensors import bytes_tensor, split_bytes
from weft.language import GraphSource
from weft.router.compile import compile_graph
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime

NUM_GRAPHS = 120
ACCEPT = "accept: 'size(text(outputs.OUT)) % 2 == 0'"


@dataclass
class Drawn:
    """Something that takes a text and gives any number of texts: a model, or a node of such.

    Attributes:
        kind: `plain`, `stream`, `broken` (a model that fails), `sequence`, `switch`, `cascade`, `merge` or `nested`.
        number: Unique in the graph.
        parts: Of a node; of a broken model what stands in for it.
        choice: Of a switch: the branch that the request takes.
        limit: Of a sequence: responses in work at once.
    """

    kind: str
    number: int
    parts: "list[Drawn]" = field(default_factory=list)
    choice: int = 0
    limit: int = 0

    @property
    def streams(self) -> bool:
        """Whether it may give several responses."""
        return self.kind in ("stream", "merge") or any(part.streams for part in self.parts)

    @property
    def is_ordered(self) -> bool:
        """Whether the order of the responses is defined."""
        return self.kind != "merge" and all(part.is_ordered for part in self.parts)

    def responses(self, text: str) -> list[str]:
        """What it gives for a text, by definition."""
        if self.kind in ("plain", "stream"):
            told = said(self.model, [text])
            return [told] if self.kind == "plain" else [f"{told}#{n}" for n in range(num_responses(told))]
        if self.kind == "broken":
            return self.parts[0].responses(text)
        if self.kind == "switch":
            return self.parts[self.choice].responses(text)
        if self.kind == "merge":
            return [response for part in self.parts for response in part.responses(text)]
        if self.kind == "cascade":
            return self._first_accepted(text)
        responses = [text]
        for part in self.parts:
            responses = [response for before in responses for response in part.responses(before)]
        return responses

    def _first_accepted(self, text: str) -> list[str]:
        latest: list[str] | None = None
        for part in self.parts[:-1]:
            responses = part.responses(text)
            if responses and len(responses[0]) % 2 == 0:
                return responses
            latest = responses if latest is None or responses else latest
        return self.parts[-1].responses(text)

    @property
    def model(self) -> str:
        """Its name, as the catalog of the label rule reads it."""
        return f"{self.kind}_1_{self.number}"

    def step(self, more: str = "", maps: str = "") -> str:
        """The step that runs it."""
        name, more = f"s{self.number}", f"{maps} {more}"
        if self.kind in ("plain", "stream"):
            return f'step {{ name: "{name}" model_name: "{self.model}" {more} }}'
        if self.kind == "broken":
            instead = self.parts[0].step(maps=maps).removeprefix("step")
            return f'step {{ name: "{name}" model_name: "{self.model}" fallback {instead} {more} }}'
        return f'step {{ name: "{name}" node: "n{self.number}" {more} }}'

    def nodes(self, name: str = "") -> Iterator[str]:
        """The nodes in it."""
        steps: list[str] = []
        if self.kind == "switch":
            cases = [f'case: "{i}"' for i in range(len(self.parts))]
            steps = [f"""on: 'get(parameters, "n{self.number}", "")'"""]
            steps += [part.step(case) for part, case in zip(self.parts, cases, strict=True)]
        elif self.kind == "cascade":
            steps = [*(part.step(ACCEPT) for part in self.parts[:-1]), self.parts[-1].step()]
        elif self.kind == "merge":
            steps = [*(part.step() for part in self.parts), 'combine { output: "OUT" method: MERGE }']
        elif self.kind == "sequence":
            last = len(self.parts) - 1
            for i, part in enumerate(self.parts):
                maps = f'input_map {{ key: "I0" value: "t{i}" }}' * (i > 0)
                maps += f' output_map {{ key: "OUT" value: "t{i + 1}" }}' * (i < last)
                steps.append(part.step(maps=maps))
            if self.streams and self.limit:
                steps.append(f"max_inflight_responses: {self.limit}")
        if steps:
            kind = "ensemble" if self.kind == "merge" else self.kind
            yield f'node {{ name: "{name or f"n{self.number}"}" {kind} {{ {" ".join(steps)} }} }}'
        for part in self.parts:
            yield from part.nodes()

    def choices(self) -> Iterator[tuple[str, str]]:
        """Parameters of the request."""
        if self.kind == "switch":
            yield f"n{self.number}", str(self.choice)
        for part in self.parts:
            yield from part.choices()


def drawn(generator: random.Random, numbers: Iterator[int], depth: int) -> Drawn:
    """Anything of a depth."""
    number = next(numbers)
    if depth == 0 or generator.random() < 0.25:
        kind = generator.choice(["plain", "stream", "stream", "broken"])
        parts = [drawn(generator, numbers, max(depth - 1, 0))] if kind == "broken" else []
        if kind == "broken" and parts[0].kind == "broken":
            return parts[0]
        return Drawn(kind, number, parts)
    kind = generator.choice(["sequence", "sequence", "switch", "cascade", "merge"])
    parts = [drawn(generator, numbers, depth - 1) for _ in range(generator.randint(2, 3))]
    if kind == "cascade" and not all(part.is_ordered for part in parts[:-1]):
        kind = "switch"  # what a cascade accepts depends on what comes first
    return Drawn(kind, number, parts, generator.randrange(len(parts)), generator.randint(0, 3))


def root_of(seed: int) -> Drawn:
    """A graph: its root is a node."""
    generator, numbers = random.Random(seed), iter(range(1000))
    while True:
        root = drawn(generator, numbers, 3)
        if root.kind not in ("plain", "stream", "broken"):
            return root


@pytest.mark.parametrize("part", range(4))
async def test_random_nodes_give_the_responses_that_they_are_to_give(part: int) -> None:
    """Each once, in order unless they are merged; the last alone is final, and nothing is left."""
    num_several = 0
    for seed in range(part, NUM_GRAPHS, 4):
        root = root_of(seed)
        text = f"""name: "g" platform: "graph" input [ {{ name: "I0" {TEXTS} }} ] output [ {{ name: "OUT" {TEXTS} }} ]
          {" ".join(root.nodes("root"))}"""
        plan = compile_graph(GraphSource(text, "g.pbtxt", "g", "1"), Catalog())
        assert root.streams == plan.signature.is_decoupled, text
        if not root.streams:
            continue
        target: Any = streaming_target()
        answer = target.infer

        async def infer(call: InferCall, context: CallContext, answer: Any = answer) -> Any:
            if call.model_name.startswith("broken"):
                raise RemoteError("UNAVAILABLE", "gone")
            return await answer(call, context)

        target.infer = infer
        executor = GraphExecutor(plan, Runtime({"model": target}))
        call = InferCall("g", inputs={"I0": bytes_tensor(["x"], (1,))}, parameters=dict(root.choices()))
        results = [result async for result in executor.stream(call, CallContext())]
        got = [split_bytes(result.outputs["OUT"].data)[0].decode() for result in results if not result.is_null]
        expected = root.responses("x")
        assert (expected if root.is_ordered else sorted(expected)) == (got if root.is_ordered else sorted(got)), text
        assert [result.is_final for result in results] == [False] * (len(results) - 1) + [True]
        assert not any(result.is_null for result in results[:-1])
        assert 0 == make.num_other_tasks()
        num_several += len(expected) > 1
    assert num_several > NUM_GRAPHS // 16
