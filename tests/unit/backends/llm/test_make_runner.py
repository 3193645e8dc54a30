"""Memory for a KV cache beside CUDA graphs, on a device that is stood in for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.backends.llm import parts as module
from weft.base.errors import InvalidArgumentError
from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.graphs import GraphPolicy

MODEL = TransformerConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)
BLOCK_BYTES = 16 * 2 * 2 * 2 * 8 * 4


class Device:
    """A device with memory for caches and graphs.

    Attributes:
        free_bytes: What is free without any.
        hidden_bytes: What all graphs take beyond the largest, which a trial does not see.
        made: Blocks of each runner, and what was captured.
    """

    def __init__(self, free_bytes: int, graph_bytes: int, hidden_bytes: int = 0) -> None:
        self.free_bytes, self.graph_bytes, self.hidden_bytes = free_bytes, graph_bytes, hidden_bytes
        self.taken_bytes = self.num_closed = 0
        self.made: list[tuple[int, str]] = []

    def make(self, num_blocks: int) -> Any:
        """A runner."""
        return Runner(self, num_blocks)


class Runner:
    """Takes memory as a runner does."""

    def __init__(self, device: Device, num_blocks: int) -> None:
        self.device, self.num_blocks = device, num_blocks
        device.made.append((num_blocks, "nothing"))

    def bind_thread(self) -> None:
        """As of ``ModelRunner``."""

    def close(self) -> None:
        """As of ``ModelRunner``."""
        self.device.num_closed += 1

    def capture(self, policy: GraphPolicy, recorder: object, *, only_largest: bool) -> None:
        """As of ``ModelRunner``."""
        device = self.device
        device.made[-1] = (self.num_blocks, "largest" if only_largest else "all")
        device.taken_bytes = self.num_blocks * BLOCK_BYTES + device.graph_bytes
        if not only_largest and device.taken_bytes + device.hidden_bytes > device.free_bytes:
            raise torch.OutOfMemoryError


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``on(device, config)``: a runner made on a device."""

    def run(device: Device, /, **fields: Any) -> Any:
        monkeypatch.setattr(module, "CudaRecorder", lambda _: SimpleNamespace(record=None))
        monkeypatch.setattr(module, "_free_bytes", lambda _: device.free_bytes - device.taken_bytes)
        monkeypatch.setattr(module, "_release", lambda: setattr(device, "taken_bytes", 0))
        config = EngineConfig(**({"device": "cuda", "dtype": "float32"} | fields)).resolved(MODEL)
        return module.make_runner(device.make, config, MODEL)

    return run


def test_the_cache_gets_what_graphs_leave(on: Any) -> None:
    """The largest graph is captured on a small cache, and what it took is not given to the cache."""
    device = Device(free_bytes=1000 * BLOCK_BYTES, graph_bytes=300 * BLOCK_BYTES)
    runner = on(device)
    assert [(2, "largest"), (runner.num_blocks, "all")] == device.made
    assert 0.85 * 700 < runner.num_blocks < 0.95 * 700


def test_it_shrinks_where_graphs_take_more_than_the_largest(on: Any) -> None:
    """A capture that runs out of memory is repeated with a smaller cache."""
    device = Device(free_bytes=1000 * BLOCK_BYTES, graph_bytes=300 * BLOCK_BYTES, hidden_bytes=90 * BLOCK_BYTES)
    runner = on(device)
    assert ["largest", "all", "all"] == [what for _, what in device.made]
    assert 2 == device.num_closed
    assert runner.num_blocks == int(0.95 * device.made[1][0])


def test_a_cache_of_a_given_size_needs_no_trial(on: Any) -> None:
    """``num_blocks`` is taken as it is."""
    device = Device(free_bytes=1000 * BLOCK_BYTES, graph_bytes=300 * BLOCK_BYTES)
    assert 77 == on(device, num_blocks=77).num_blocks
    assert [(77, "all")] == device.made


def test_what_cannot_fit_is_said_with_its_cure(on: Any) -> None:
    """Graphs that leave no room, or a cache that is far too large, end the load."""
    with pytest.raises(InvalidArgumentError, match="two blocks of this model"):
        on(Device(free_bytes=300 * BLOCK_BYTES, graph_bytes=301 * BLOCK_BYTES))
    device = Device(free_bytes=1000 * BLOCK_BYTES, graph_bytes=0)
    with pytest.raises(InvalidArgumentError, match="lower num_blocks or kv_cache_bytes, or set enable_cuda_graphs"):
        on(device, num_blocks=5000)


def test_without_graphs_and_on_a_cpu_nothing_is_captured(on: Any) -> None:
    """The cache has its share of free memory, or the configured size."""
    device = Device(free_bytes=1000 * BLOCK_BYTES, graph_bytes=300 * BLOCK_BYTES)
    assert 900 == on(device, enable_cuda_graphs=False).num_blocks
    assert 50 == on(device, device="cpu", num_blocks=50).num_blocks
    assert {"nothing"} == {what for _, what in device.made}


def test_shapes_follow_from_speculation() -> None:
    """With speculation, steps in which every sequence has all its drafts are captured too."""
    assert {1} == {s.q_len for s in module.graph_policy(EngineConfig(max_num_seqs=5)).shapes}
    config = EngineConfig(max_num_seqs=5, speculation="ngram", num_speculative_tokens=3)
    assert {1, 4} == {s.q_len for s in module.graph_policy(config).shapes}
