"""Four replicas of a language model under ``weft up``: prompts go where their beginnings were computed."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.language_model import write_folder, write_model
from tests.processes import scrape
from tritonclient.grpc import InferInput, InferRequestedOutput, aio

from weft.base.processes.process import Endpoint
from weft.mesh.running import running_mesh

pytestmark = pytest.mark.long

_REPLICAS = ("model", "model-2", "model-3", "model-4")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Endpoint]]:
    root = tmp_path_factory.mktemp("prefixes")
    write_folder(root / "folder")
    (root / "repository" / "graphs").mkdir(parents=True)
    (root / "repository" / "model").mkdir()
    write_model(root / "repository" / "model", "writer", root / "folder", num_blocks=2048)
    arguments = ["--replicas", "model=4", "--target-policy", "model=prefix"]
    with running_mesh(root / "repository", arguments) as endpoints:
        yield endpoints


async def ask(client: Any, text: str) -> tuple[str, int, int]:
    """The answer, and how many tokens of the prompt there were and were cached."""
    sampling = json.dumps({"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}).encode()
    inputs = []
    for name, value in (("text_input", text.encode()), ("sampling_parameters", sampling)):
        inputs.append(InferInput(name, [1], "BYTES"))
        inputs[-1].set_data_from_numpy(np.array([value], np.object_))
    names = ("text_output", "num_input_tokens", "num_cached_tokens")
    result = await client.infer("writer", inputs, outputs=[InferRequestedOutput(name) for name in names])
    text, *counts = (result.as_numpy(name)[0] for name in names)
    return text.decode(errors="replace"), *map(int, counts)  # type: ignore[return-value,attr-defined]


def computed(mesh: Mapping[str, Endpoint]) -> list[float]:
    """Prompt tokens of each replica."""
    pages = [scrape(mesh[name].metrics) for name in _REPLICAS]
    return [sum(n for key, n in page.items() if key.startswith("weft_llm_prompt_tokens_total")) for page in pages]


def system_prompt(number: int) -> str:
    return f"system {number}: " + "the quick brown fox jumps over the lazy dog " * 12


def test_replicas_share_a_key(mesh: Mapping[str, Endpoint]) -> None:
    """Which only this user can read; so the names of their blocks are the same."""
    arguments = [Path(f"/proc/{mesh[name].pid}/cmdline").read_bytes().split(b"\0") for name in _REPLICAS]
    keys = {one for each in arguments for one in each if one.startswith(b"--mesh-key-file=")}
    (key,) = keys
    assert 0o600 == os.stat(key.partition(b"=")[2]).st_mode & 0o777


async def test_sessions_stay_where_their_text_is(mesh: Mapping[str, Endpoint]) -> None:
    """Each turn finds all whole blocks of the one before, and the sessions are spread over the replicas."""
    async with aio.InferenceServerClient(mesh["router"].grpc) as client:
        texts = {number: system_prompt(number) for number in range(12)}
        num_before = dict.fromkeys(texts, 0)
        for turn in range(4):
            for number, text in texts.items():
                answer, num_tokens, num_cached = await ask(client, text)
                if turn:
                    assert num_cached >= num_before[number] // 8 * 8 - 8, (turn, number)
                num_before[number] = num_tokens
                texts[number] = text + answer + f" turn {turn}, and more of the quick brown fox. " * 4
    assert sum(n > 0 for n in computed(mesh)) > 1
    found = scrape(mesh["router"].metrics).items()
    picks = {key.partition('"')[2].partition('"')[0]: n for key, n in found if "prefix_picks_total" in key}
    assert {"most": 36.0, "load": 0.0, "new": 12.0} == picks


async def test_kill_9_moves_the_sessions_of_a_replica(mesh: Mapping[str, Endpoint]) -> None:
    """They go on at others, with the same answers; nobody sees an error, also after the replica is back."""
    async with aio.InferenceServerClient(mesh["router"].grpc) as client:
        texts = [system_prompt(100 + number) for number in range(12)]
        expected = [(await ask(client, text))[0] for text in texts]
        os.kill(mesh["model-2"].pid, signal.SIGKILL)
        for _ in range(3):
            assert expected == [(await ask(client, text))[0] for text in texts]
        async with asyncio.timeout(90):
            while scrape(mesh["router"].metrics)['weft_target_serving_replicas{target="model"}'] != 4:
                assert expected[0] == (await ask(client, texts[0]))[0]
        assert expected == [(await ask(client, text))[0] for text in texts]
