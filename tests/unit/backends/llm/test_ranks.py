"""Models in ranks, at the level of the engine: what is refused, what a rank cannot load, and the second tier."""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.integration.test_ranks import children, is_gone
from tests.processes import wait_until
from tests.unit.llm.engine_fixture import Answer, assert_clean
from tests.unit.llm.speculation.folders import write_model

from weft.backends.llm.loading import load_engine
from weft.backends.llm.settings import Settings
from weft.base.errors import InvalidArgumentError, UnavailableError, WeftError
from weft.llm.config import EngineConfig
from weft.llm.engine import Engine
from weft.llm.ranks.ends import prove
from weft.llm.ranks.runner import GroupRunner
from weft.llm.request import Delta


def load(folder: Path, **config: Any) -> Engine:
    """An engine of two ranks, with small blocks."""
    fields = {"num_blocks": 24, "block_size": 4, "max_num_seqs": 2, "tensor_parallel_size": 2} | config
    settings = Settings(EngineConfig(**fields), max_text_bytes=1000, has_weights=True)
    return load_engine(folder, settings, after_deltas=lambda: None, on_lost=lambda error: None)


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Of the parameters alone, and of the model; nothing is started."""
    folder = write_model(tmp_path / "model")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be from 1 to 256, got 0"),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size must be one of 1, 2 for this"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be from 1 to num_hidden_layers = 1, got 2"),
        ({"num_remote_ranks": 2}, "must be less than the 2 ranks"),
        ({"num_remote_ranks": 1}, "rank_listen_address must be set with num_remote_ranks"),
        ({"rank_key_file": "key"}, "rank_key_file must be set with num_remote_ranks, and only then"),
        ({"rank_timeout_s": 0.0}, "rank_timeout_s must be from 0.1"),
    ]
    for config, problem in wrong:
        with pytest.raises(InvalidArgumentError, match=problem):
            load(folder, **config)
    (folder / "key").write_text("short\n")
    remote: dict[str, Any] = {"num_remote_ranks": 1, "rank_key_file": "key"}
    for address, problem in (("localhost", "must be HOST:PORT, got 'localhost'"), ("localhost:1", "at least 16 bytes")):
        with pytest.raises(InvalidArgumentError, match=problem):
            load(folder, rank_listen_address=address, **remote)
    assert [] == children(os.getpid())


def test_who_has_no_key_is_no_rank() -> None:
    """Whether it has another key, or sends too little, or nothing."""
    for sent, problem in ((bytes(64), "another key"), (bytes(3), "it sent 3 of the 32"), (b"", "it sent 0 of the 32")):
        mine, its = socket.socketpair()
        with mine, its:
            its.sendall(sent)
            its.shutdown(socket.SHUT_WR)
            with pytest.raises(ValueError, match=problem):
                prove(mine, b"a secret of many letters", is_leader=True)


def test_a_group_that_is_closed_before_it_listens_waits_for_nobody(tmp_path: Path) -> None:
    """Its start fails at once, though a rank of another machine is missing."""
    (tmp_path / "key").write_text("a secret of many letters\n")
    remote: dict[str, Any] = {"num_remote_ranks": 1, "rank_key_file": "key", "rank_listen_address": "127.0.0.1:9"}
    group = GroupRunner(EngineConfig(tensor_parallel_size=2, **remote), {"directory": str(tmp_path)}, vocab_size=8)
    group.close()
    with pytest.raises(UnavailableError, match="closed before all of its ranks had come"):
        group.start()


@pytest.mark.long
def test_what_a_rank_cannot_load_is_the_error_of_the_load(tmp_path: Path) -> None:
    """With its status, whichever rank fails, and no rank is left."""
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(InvalidArgumentError, match=r"model\.safetensors"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeftError, match="safetensors"):
        load(folder)
    assert [] == children(os.getpid())


@pytest.mark.long
def test_the_second_tier_is_divided_too(tmp_path: Path) -> None:
    """Blocks that were evicted are loaded again, by every rank its part, and tokens are those of one process."""
    folder = write_model(tmp_path / "model", num_hidden_layers=2)
    prompts = [[first, *range(20)] for first in range(8)]
    texts = {}
    for num_ranks in (1, 2):
        engine = load(folder, tensor_parallel_size=num_ranks, kv_offload_bytes=1 << 18)
        engine.start()
        for _ in range(2):
            for prompt in prompts:
                answer = Answer(prompt, max_tokens=12)
                engine.submit(answer.request)
                texts[num_ranks, prompt[0]] = answer.wait().text
        assert engine.pool.tier.num_loaded > 0
        assert engine.pool.tier.num_failed == 0
        assert engine.stop(5.0)
        assert_clean(engine)
    assert all(texts[1, first] == texts[2, first] for first in range(8))


@pytest.mark.long
def test_a_lost_rank_ends_the_engine(tmp_path: Path) -> None:
    """Requests that run and requests that come later fail with UNAVAILABLE, every block is free, every rank gone."""
    engine = load(write_model(tmp_path / "model"))
    ranks = children(os.getpid())
    lost: list[WeftError] = []
    engine._on_lost = lost.append

    def kill(delta: Delta) -> None:
        if delta.error is None:
            os.kill(ranks[0], signal.SIGKILL)

    answer = Answer([3], max_tokens=60, on_delta=kill)
    engine.submit(answer.request)
    engine.start()
    assert isinstance(answer.wait().error, UnavailableError)
    wait_until(lambda: lost)
    with pytest.raises(UnavailableError) as refusal:
        engine.submit(Answer([3]).request)
    assert refusal.value.is_refused
    assert all(is_gone(pid) for pid in ranks)
    assert engine.pool.num_used == 0
    engine.pool.check()
