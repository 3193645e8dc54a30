"""Decode steps as graphs: which shape, padding, capture and replay; on a GPU replay equals eager."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.llm.engine_fixture import SHAPES, Answer, make_engine, random_prompts, submit

from weft.base.errors import InvalidArgumentError
from weft.llm.config import EngineConfig
from weft.llm.graphs import BATCH_SIZES, GraphPolicy, build_shrinking
from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import random_weights
from weft.llm.runner import HostCopy
from weft.llm.speculation.draft_model import DraftModelProposer


class FakeRecorder:
    """Repeats work by doing it again, into the result of the first time, as a graph would."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replays = 0

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See ``Recorder``."""
        self.num_recorded += 1
        result = work().clone()

        def replay() -> None:
            self.num_replays += 1
            result.copy_(work())

        return replay, result


def test_a_uniform_step_runs_in_the_smallest_shape_that_holds_it():
    """Decodes and decodes with all drafts have a shape; mixed steps, other lengths and too many sequences have none."""
    policy = GraphPolicy(300, (1, 5))
    assert (1, 1) == policy.choose(1, 1, 1)
    assert (16, 1) == policy.choose(9, 9, 1)
    assert (256, 1) == policy.choose(193, 193, 1)
    assert (24, 5) == policy.choose(17, 85, 5)
    assert policy.choose(257, 257, 1) is None
    assert policy.choose(2, 6, 5) is None
    assert policy.choose(2, 6, 3) is None


@pytest.mark.parametrize("max_num_seqs", [1, 3, 64, 65, 256, 1000])
def test_shapes_cover_every_number_of_sequences_and_no_more(max_num_seqs):
    """The largest comes first; padding is less than the step itself; nothing larger than a step is captured."""
    policy = GraphPolicy(max_num_seqs, (1, 4))
    sizes = [shape.num_seqs * shape.q_len for shape in policy.shapes]
    assert sorted(sizes, reverse=True) == sizes
    for num_seqs in range(1, min(max_num_seqs, BATCH_SIZES[-1]) + 1):
        shape = policy.choose(num_seqs, num_seqs, 1)
        assert shape in policy.shapes
        assert num_seqs <= shape.num_seqs < 2 * num_seqs
    assert len([size for size in BATCH_SIZES if size < max_num_seqs]) <= len(sizes) / 2


def serve_on_graphs(recorder: FakeRecorder | None, **config) -> list[list[int]]:
    """Tokens of prompts of many lengths, greedy and sampled, by an engine on graphs or without."""
    engine = make_engine(max_num_seqs=6, max_num_batched_tokens=16, **config)
    if recorder is not None:
        runner: Any = engine._core._runner
        runner.capture(GraphPolicy(6, (1, 3)), recorder.record)
    prompts = random_prompts(9, 1, 30, 1)
    answers = [Answer(p, max_tokens=8, temperature=float(i % 2), seed=i) for i, p in enumerate(prompts)]
    engine.start()
    submit(engine, answers)
    texts = [answer.wait().text for answer in answers]
    assert engine.stop(grace_s=5.0)
    return texts


@pytest.mark.parametrize("config", [{}, {"num_blocks": 9}, {"kv_cache_dtype": "int8", "block_size": 4}])
def test_tokens_on_graphs_are_those_without(config):
    """With padded steps, shortage of blocks and 8-bit caches: graphs build their inputs from tables alone."""
    recorder = FakeRecorder()
    assert serve_on_graphs(None, **config) == serve_on_graphs(recorder, **config)
    assert 2 * 4 == recorder.num_recorded
    assert recorder.num_replays > 5


def runner_of(**config: Any) -> Any:
    """The runner of a new engine."""
    return make_engine(block_size=16, **config)._core._runner


@pytest.mark.parametrize(("num_seqs", "q_len"), [(3, 1), (5, 3)])
def test_padding_writes_the_null_block_alone(num_seqs, q_len):
    """A padded step changes the blocks that its tokens are in, and block 0; so does one that follows a larger one."""
    runner = runner_of(max_num_seqs=8)
    runner.capture(GraphPolicy(8, (1, 3)), FakeRecorder().record)
    hidden_of(runner, decode_plan(8, q_len))
    plan = decode_plan(num_seqs, q_len)
    plan = plan._replace(token_ids=plan.token_ids + 30)
    before = runner.kv.clone()
    hidden = hidden_of(runner, plan)
    assert len(plan.token_ids) == len(hidden)
    changed = (runner.kv != before).flatten(1).any(1).nonzero().flatten().tolist()
    own = set((plan.slot_mapping // 16).tolist())
    assert own <= set(changed) <= {0, *own}
    assert torch.equal(hidden, hidden_of(runner_of(max_num_seqs=8), plan))


def test_a_cache_that_does_not_fit_shrinks_by_few_percent_at_a_time():
    """It is built anew until it fits, memory released in between; with a limit."""
    events: list[object] = []

    def build(num_blocks: int) -> str:
        events.append(num_blocks)
        if num_blocks > 900:
            raise MemoryError
        return "built"

    options: dict[str, Any] = {"out_of_memory": MemoryError, "release": lambda: events.append("release")}
    assert "built" == build_shrinking(1000, build, **options)
    assert [1000, "release", 950, "release", 902, "release", 856] == events
    with pytest.raises(InvalidArgumentError, match="a KV cache of 100000 blocks"):
        build_shrinking(100_000, build, **options)
    assert "release" == events[-1]
    with pytest.raises(ValueError, match="other"):
        build_shrinking(1000, lambda _: (_ for _ in ()).throw(ValueError("other")), **options)


def test_the_cache_of_a_closed_runner_is_freed():
    """The model, which goes on, keeps nothing of it: a smaller cache is tried where the first did not fit."""
    runner = runner_of(max_num_seqs=8)
    hidden_of(runner, decode_plan(2, 1))
    model, cache = runner._model, weakref.ref(runner.kv)
    runner.close()
    del runner
    gc.collect()
    assert (torch.float32, None) == (model.dtype, cache())


def test_a_draft_model_frees_its_cache_before_it_makes_the_next(monkeypatch):
    """A runner that did not fit leaves nothing behind when a smaller one is tried with the same draft model."""
    runner = runner_of(max_num_seqs=8)
    model = runner._model
    proposer = DraftModelProposer(model, 16)
    proposer.bind(runner._state, 8, 16)
    model._layers_of(proposer._kv)
    cache, new_kv = weakref.ref(proposer._kv), model.new_kv
    freed = []

    def make(*sizes: int) -> torch.Tensor:
        gc.collect()
        freed.append(cache() is None)
        return new_kv(*sizes)

    monkeypatch.setattr(model, "new_kv", make)
    proposer.bind(runner._state, 4, 16)
    assert [True] == freed


def test_a_copy_to_the_host_on_a_cpu_copies_nothing():
    """The arrays are the tensors' own memory."""
    tensor = torch.arange(3)
    (array,) = HostCopy(None, tensor).wait()
    tensor[0] = 7
    assert [7, 1, 2] == array.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_to_the_host_waits_for_what_was_launched_before():
    """What is changed before the copy is in it."""
    stream = torch.cuda.Stream()
    tensor = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    for _ in range(50):
        tensor += 1
    copy = HostCopy(stream, tensor, tensor[:3])
    whole, first = copy.wait()
    assert np.array_equal(whole, np.full(1 << 20, 50))
    assert np.array_equal(whole[:3], first)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("deterministic", [False, True])
def test_replay_equals_eager_bitwise_and_compiles_nothing(deterministic):
    """On a GPU: hidden states of captured decodes are bitwise those of the same shape launched one by one."""
    from triton import knobs

    from weft.llm.graphs import CudaRecorder

    config = SHAPES["wide"]
    weights = random_weights(config, seed=3)
    model = TransformerModel(config, weights, dtype=torch.bfloat16, device="cuda", deterministic=deterministic)
    options: dict[str, Any] = {"model": model, "dtype": "bfloat16", "deterministic": deterministic, "max_num_seqs": 4}
    eager, graphs = (runner_of(**options) for _ in range(2))
    graphs.capture(GraphPolicy(4, (1, 3)), CudaRecorder(torch.device("cuda")).record)
    compiled: list[object] = []
    for num_seqs, q_len in ((1, 1), (4, 1), (4, 3)):
        plan = decode_plan(num_seqs, q_len)
        expected = hidden_of(eager, plan)
        knobs.runtime.jit_post_compile_hook = lambda **kernel: compiled.append(kernel)
        try:
            assert torch.equal(expected, hidden_of(graphs, plan))
        finally:
            knobs.runtime.jit_post_compile_hook = None
    assert [] == compiled


def hidden_of(runner, plan) -> torch.Tensor:
    """Hidden states of a plan."""
    with torch.inference_mode():
        runner._state.update(plan)
        return runner._forward(plan, torch.from_numpy(plan.token_ids)).clone()


def decode_plan(num_seqs: int, q_len: int):
    """A step of sequences with 40 tokens before it, over zero keys and values in blocks of their own."""
    from weft.backends.llm.loading import _plan

    plan = _plan(EngineConfig(block_size=16), num_seqs, num_seqs * q_len, 0.0, None)
    table = [(slot, column, 1 + slot * 8 + column) for slot in range(num_seqs) for column in range(8)]
    positions = plan.positions + 40
    blocks = np.array(table)[:, 2].reshape(num_seqs, 8)[np.repeat(np.arange(num_seqs), q_len), positions // 16]
    return plan._replace(
        positions=positions,
        ctx_len=plan.ctx_len + 40,
        token_ids=np.arange(1, 1 + num_seqs * q_len, dtype=np.int32),
        slot_mapping=blocks.astype(np.int64) * 16 + positions % 16,
        table_delta=np.array(table, np.int32),
        max_ctx_len=40 + q_len,
    )
