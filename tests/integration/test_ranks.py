"""Language models whose ranks are processes: a model service with real clients, and ranks that die."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.language_model import Service, Stream, ask, running_service, write_folder, write_model
from tests.ports import free_port
from tests.processes import running, wait_until
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.long

PROMPTS = ("the quick brown fox", "Sylter Deich, größer", "x")
#: Runs for seconds, unless something ends it.
LONG = {"max_tokens": 1500, "ignore_eos": True}
#: Divisions of a model into ranks that are tested.
SIZES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "2x2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
CHOICES: list[dict[str, Any]] = [
    {"max_tokens": 40, "ignore_eos": True},
    {"max_tokens": 30, "temperature": 1.0, "seed": 7, "top_k": 40, "n": 2},
    {"max_tokens": 30, "temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"max_tokens": 40, "guided_regex": "[a-c]{5,20}"},
    {"max_tokens": 20, "bad_words": ["e", "a"]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    folder = tmp_path_factory.mktemp("hf")
    write_folder(folder)
    return folder


def children(pid: int) -> list[int]:
    """Ids of the ranks that a process has started, in this order."""
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    found = sorted(int(child) for some in lists for child in some)
    return [child for child in found if b"weft.backends.llm.rank" in Path(f"/proc/{child}/cmdline").read_bytes()]


def ranks_of(service: Service) -> list[int]:
    """Process ids of the ranks that a service has started."""
    return children(service.process.pid)


def is_gone(pid: int) -> bool:
    """Whether there is no such process, not even a zombie."""
    return not Path(f"/proc/{pid}").exists()


def answers(service: Service, model: str) -> list[Any]:
    """What a model answers to all prompts and choices."""
    found = []
    for prompt in PROMPTS:
        for sampling in CHOICES:
            outputs = ask(service, model, prompt, ["text_output", "output_ids"], sampling=sampling).outputs
            found.append((list(outputs["text_output"]), outputs["output_ids"].tolist()))
    return found


@pytest.fixture(scope="module", params=SIZES)
def service(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Service]:
    """A service of the model ``alone`` in one process, and as ``group`` in ranks."""
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "alone", folder)
    sizes = SIZES[request.param]
    write_model(repository, "group", folder, rank_timeout_s=5, kv_offload_bytes=1 << 20, num_blocks=300, **sizes)
    with running_service(repository) as started:
        yield started


def is_ready(service: Service, model: str = "group") -> bool:
    """Whether the service says that the model is."""
    with triton.InferenceServerClient(service.grpc) as client:
        return bool(client.is_model_ready(model))


def assert_comes_back(service: Service, ranks: list[int]) -> None:
    """The group of these processes is replaced by one that answers as it should and owns no block then."""
    wait_until(lambda: all(is_gone(pid) for pid in ranks), "the end of the group")
    wait_until(lambda: ranks_of(service) and is_ready(service), "the next group")
    assert answers(service, "group") == answers(service, "alone")
    wait_until(lambda: service.figure("weft_llm_kv_cache_usage_ratio", "group") == 0)


def test_tokens_are_those_of_one_process(service: Service) -> None:
    """Greedy and sampled, with penalties, grammars, forbidden words and several choices."""
    assert answers(service, "group") == answers(service, "alone")


def test_a_killed_rank_fails_its_requests_and_the_group_comes_back(service: Service) -> None:
    """Each rank, in the middle of a stream: an error, and no wrong token before it; then the same tokens as ever."""
    whole = ask(service, "alone", "x", ["output_ids"], sampling=LONG).outputs["output_ids"].tolist()
    restarts = service.figure("weft_llm_rank_restarts_total", "group")
    for index in range(len(ranks_of(service))):
        ranks = ranks_of(service)
        stream = Stream(service)
        stream.send("group", "x", outputs=["output_ids"], sampling=LONG)
        some = [stream.take()]
        os.kill(ranks[index], signal.SIGKILL)
        *rest, last = stream.rest()
        stream.close()
        got = [token for each in (*some, *rest) for token in each.outputs["output_ids"].tolist()]
        assert "were lost" in last.error
        assert "SIGKILL" in last.error
        assert got == whole[: len(got)]
        assert_comes_back(service, ranks)
        restarts += 1
        assert restarts == service.figure("weft_llm_rank_restarts_total", "group")


def test_a_rank_that_is_killed_while_nothing_runs_is_replaced(service: Service) -> None:
    """Nobody has to ask first."""
    ranks = ranks_of(service)
    os.kill(ranks[-1], signal.SIGKILL)
    assert_comes_back(service, ranks)


def test_a_rank_that_hangs_is_replaced(service: Service) -> None:
    """A step that takes longer than ``rank_timeout_s`` fails its requests, and ends the group."""
    ranks = ranks_of(service)
    os.kill(ranks[0], signal.SIGSTOP)
    with pytest.raises(InferenceServerException, match="longer than rank_timeout_s") as error:
        ask(service, "group", "x", sampling=LONG)
    assert "UNAVAILABLE" in str(error.value.status())
    assert_comes_back(service, ranks)


def test_ranks_end_with_a_service_that_is_killed(folder: Path, tmp_path: Path) -> None:
    """Also while they compute: no orphan is left."""
    write_model(tmp_path, "group", folder, tensor_parallel_size=2)
    with running("weft.services.model", "--repository", str(tmp_path)) as process:
        service = Service(process.process, {"grpc": process.grpc, "metrics": process.metrics})
        wait_until(lambda: is_ready(service))
        ranks = ranks_of(service)
        assert 2 == len(ranks)
        stream = Stream(service)
        stream.send("group", "x", sampling=LONG)
        stream.take()
        process.kill()
        for pid in ranks:
            wait_until(lambda pid=pid: is_gone(pid), "the end of a rank")
        stream.close(cancels=True)


def test_a_rank_of_another_machine_connects_again(folder: Path, tmp_path: Path) -> None:
    """It shows that it has the key; who has another one is refused; killed, it comes back, and so does the group."""
    (tmp_path / "key").write_text("a secret of many letters\n")
    (tmp_path / "wrong").write_text("a secret of other letters\n")
    repository = tmp_path / "repository"
    repository.mkdir()
    address = f"127.0.0.2:{free_port()}"  # and no other of this machine
    remote: dict[str, Any] = {"rank_listen_address": address, "rank_key_file": tmp_path / "key", "num_remote_ranks": 1}
    write_model(repository, "alone", folder)
    write_model(repository, "group", folder, tensor_parallel_size=2, **remote)
    command = [sys.executable, "-P", "-m", "weft.services.ranks", "--leader", address, "--key-file"]
    with (
        subprocess.Popen([*command, str(tmp_path / "wrong")]) as stranger,
        subprocess.Popen([*command, str(tmp_path / "key")]) as worker,
    ):
        try:
            with running_service(repository) as service:
                for _ in range(2):
                    assert answers(service, "group") == answers(service, "alone")
                    (rank,) = children(worker.pid)
                    os.kill(rank, signal.SIGKILL)
                    assert_comes_back(service, [*ranks_of(service), rank])
            assert [] == children(stranger.pid)
        finally:
            for process in (stranger, worker):
                process.terminate()
                assert 0 == process.wait(30)
