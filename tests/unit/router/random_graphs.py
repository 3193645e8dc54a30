"""What random graphs are made of.

Every tensor is UINT8 of shape [rows, 8], but for those around a collector. Every node has the input X, the optional
input E and the output Y, and it may have the output Z. A model gives OUT, and it may give AUX. Before a collector
stands a model that gives OUT, TEXT (a string) and NUMS (any number of bytes), and behind it one that reads them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from weft.language.plan import NodePlan
from weft.router.combine import METHODS, CombineMethod
from weft.router.policies.hedge import HedgePlan
from weft.router.policies.retry import RetryPlan

CODES = ("UNAVAILABLE", "ABORTED", "INTERNAL", "UNKNOWN")
WIDTH = 8
#: Texts of which answers before a collector are made; some of them end sentences, some only with the text that follows.
FRAGMENTS = ("a", "b.", " c", "d!", '."', " ", "\n", "e? f", "", "ä", "g.) H. ", "好。", "i, ", "  ")


@dataclass(frozen=True)
class Test:
    """A test of a tensor or of a step; it is rendered so that it can be evaluated whatever is absent.

    Attributes:
        name: A tensor, or `steps.<name>`.
        rest: Of a tensor: it holds if its least byte is less than this modulo 4; 0: if it is there. Absent: it does
            not hold.
        is_not: It holds if it would not.
    """

    __test__ = False

    name: str
    rest: int = 0
    is_not: bool = False

    @property
    def is_of_step(self) -> bool:
        """Whether it asks if a step has answered."""
        return self.name.startswith("steps.")


@dataclass(frozen=True)
class Model:
    """A model that answers, or fails, after a while; what a flaky one does depends on when it is called.

    Attributes:
        required, optional: Its inputs.
        outputs: What it gives.
        leaves_out: What it may leave out.
        streams: It is decoupled: it gives any number of responses, and then perhaps fails.
        is_ragged: The rows of an answer are as long as one another, and as what is asked decides.
        is_batched: It stands in a graph with a batch dimension, and so has one.
    """

    index: int
    fails: bool
    is_flaky: bool = False
    required: tuple[str, ...] = ("X",)
    optional: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("OUT",)
    leaves_out: tuple[str, ...] = ()
    streams: bool = False
    is_ragged: bool = False
    is_batched: bool = True

    @property
    def takes_batches(self) -> bool:
        """Whether it has a batch dimension; where the graph has one, every model does."""
        return self.is_batched or self.index % 3 > 0

    @property
    def name(self) -> str:
        return f"m{self.index}"

    @property
    def code(self) -> str:
        return CODES[self.index % len(CODES)]

    def fate(self, at_ns: int) -> tuple[int, bool]:
        """How long a call takes that is made then, 1 to 100 ms and no two sums alike, and whether it fails."""
        fate = int.from_bytes(blake2b(f"{self.name}@{at_ns if self.is_flaky else 0}".encode()).digest()[:8])
        return 1_000_000 + fate % 99_000_000, fate >> 63 == 1 if self.is_flaky else self.fails

    def responses(self, rows: Sequence[Mapping[str, bytes]]) -> list[dict[str, list[bytes]]]:
        """What a decoupled one makes of some rows."""
        num_responses = sum(self.row("number", row)[0] for row in rows) % 4
        return [self.answer(rows, str(number)) for number in range(num_responses)]

    def lists(self, rows: Sequence[Mapping[str, bytes]]) -> tuple[list[list[bytes]], list[int]]:
        """A list for each row, all of one length that the rows decide; and how many entries of each count."""
        size = sum(self.row("size", row)[0] for row in rows) % 6
        lists = [[self.row(f"entry{index}", row) for index in range(size)] for row in rows]
        return lists, [self.row("count", row)[0] % (size + 1) for row in rows]

    def answer(self, rows: Sequence[Mapping[str, bytes]], number: str = "") -> dict[str, list[bytes]]:
        """What it makes of some rows: each row alone, but an output is left out of all of them."""
        answer = {}
        for output in self.outputs:
            made = [self.row(output + number, row) for row in rows]
            if output in self.leaves_out and not sum(row[1] for row in made) % 2:
                continue
            size = sum(row[0] for row in made) % (WIDTH + 1) if self.is_ragged or output == "NUMS" else WIDTH
            answer[output] = [row[:size] for row in made]
            if output == "TEXT":
                chosen = [[FRAGMENTS[byte % len(FRAGMENTS)] for byte in row[: row[0] % 4]] for row in made]
                answer[output] = ["".join(fragments).encode() for fragments in chosen]
        return answer

    def row(self, output: str, inputs: Mapping[str, bytes]) -> bytes:
        """A row of an output."""
        parts = [f"{self.name}{output}".encode(), *(name.encode() + row for name, row in sorted(inputs.items()))]
        return blake2b(b"|".join(parts), digest_size=WIDTH).digest()


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        inputs, outputs: Pairs of a name of the target and a tensor of the node.
        constants: Pairs of a name of the target and the row that it always gets.
        defaults: Tensors that have a default.
        when: All of these.
        value: Chooses a switch's branch by `on`.
    """

    name: str
    target: "Model | Node"
    inputs: tuple[tuple[str, str], ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    constants: tuple[tuple[str, bytes], ...] = ()
    is_soft: bool = False
    defaults: tuple[str, ...] = ()
    when: tuple[Test, ...] = ()
    accept: Test | None = None
    fallback: "Step | None" = None
    after: tuple[str, ...] = ()
    timeout_ms: int = 0
    min_remaining_ms: int = 0
    value: str = ""
    is_otherwise: bool = False
    retry: RetryPlan | None = None
    hedge: HedgePlan | None = None
    is_cached: bool = False

    @property
    def chain(self) -> "list[Step]":
        """The step and its fallbacks."""
        return [self, *(self.fallback.chain if self.fallback else [])]


@dataclass(frozen=True)
class Node:
    """A node.

    Attributes:
        outputs: Y, and perhaps Z.
        is_declared: Whether the file says what comes out.
        answer_after: Of a sequence: names of steps that must have ended.
        in_place: Of a sequence: pairs of a tensor of a step and the input of the node whose name it has in the file.
        again: The test of a loop.
        carries: Tensor that the next round gets as X; "" for none.
        split: Of a map: the model that makes lists, L, of X. The one step of the map runs for each of their rows.
        join: Of a map: the model that makes Y of X and the lists of the step's answers.
        has_lengths: Of a map: the lists have lengths of their own.
        chunk_rows, max_inflight: Of a map: `max_batch_size` and `max_inflight`.
        collects_lists: Of a map: its rows follow one another in a LIST; the join gets their lengths as N.
        piece, count, max_bytes, joins: Of a collector, as in the file.
        is_graph: Whether it is a graph of its own.
        is_batched: Of the root, or a graph: whether it has a batch dimension.
    """

    name: str
    kind: type[NodePlan]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...] = ("Y",)
    is_declared: bool = True
    is_ordered: bool = False
    answer_after: tuple[str, ...] = ()
    in_place: tuple[tuple[str, str], ...] = ()
    per_row: bool = False
    quorum: int = 0
    straggler_ms: int = 0
    method: CombineMethod = METHODS["FIRST"]
    custom: Model | None = None
    max_iterations: int = 0
    again: Test | None = None
    carries: str = ""
    split: Model | None = None
    join: Model | None = None
    has_lengths: bool = False
    chunk_rows: int = 0
    max_inflight: int = 0
    collects_lists: bool = False
    piece: str = ""
    count: int = 0
    max_bytes: int = 0
    joins: tuple[str, ...] = ()
    is_graph: bool = False
    is_batched: bool = True


def nodes_within(node: Node, *, of_file: bool = False) -> Iterator[Node]:
    """A node and every node in it; of its file, without those of graphs of their own."""
    yield node
    for step in node.steps:
        for one in step.chain:
            if isinstance(one.target, Node) and not (of_file and one.target.is_graph):
                yield from nodes_within(one.target, of_file=of_file)


def steps_within(node: Node) -> Iterator[Step]:
    """Every step of a node and of the nodes in it, fallbacks included."""
    for inner in nodes_within(node):
        for step in inner.steps:
            yield from step.chain


def models_within(node: Node) -> Iterator[Model]:
    """Every model that a node may call."""
    yield from (step.target for step in steps_within(node) if isinstance(step.target, Model))
    for inner in nodes_within(node):
        yield from (model for model in (inner.custom, inner.split, inner.join) if model is not None)


def default_row(step: Step, tensor: str) -> bytes:
    """A step's default, for each row."""
    return blake2b(f"{step.name} {tensor}".encode(), digest_size=WIDTH).digest()
