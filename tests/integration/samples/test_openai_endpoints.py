"""Endpoints of OpenAI's interface beside chats and completions, and what the sample mesh does with them."""

import base64
import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tests.case_files import table

from weft import __version__
from weft.base.processes.process import Endpoint

TEXTS = [f"text number {i}" + " and more" * (i % 5) for i in range(40)]


@pytest.fixture
def client(mesh: Mapping[str, Endpoint]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{mesh['gateway'].http}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(mesh: Mapping[str, Endpoint], path: str, text: str = "") -> tuple[int, Any]:
    with contextlib.closing(http.client.HTTPConnection(mesh["gateway"].http, timeout=30)) as connection:
        connection.request("POST" if text else "GET", path, text or None, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.mark.parametrize(("kind", "text", "words"), table(Path(__file__).with_name("openai_bodies.txt")))
def test_what_does_not_fit_is_refused(mesh: Mapping[str, Endpoint], kind: str, text: str, words: str) -> None:
    """With a status, and what to do."""
    path, _, body = text.partition(" ")
    status, answer = ask(mesh, path, body)
    assert f"{status} " == words[:4]
    assert words[4:] in answer["error"]["message"]


def test_embeddings_are_those_of_the_graph(mesh: Mapping[str, Endpoint], client: openai.OpenAI) -> None:
    """More texts than fit a batch, in their order; as numbers and in base64; shortened ones have length 1."""
    whole = client.embeddings.create(model="embed", input=TEXTS, encoding_format="float")
    assert list(range(40)) == [one.index for one in whole.data]
    vectors = np.array([one.embedding for one in whole.data], np.float32)
    assert (40, 384) == vectors.shape
    _, alone = ask(
        mesh, "/v1/embeddings", json.dumps({"model": "embed", "input": TEXTS[37], "encoding_format": "base64"})
    )
    data = base64.b64decode(alone["data"][0]["embedding"])
    assert np.allclose(vectors[37], np.frombuffer(data, "<f4"), atol=1e-5)
    short = np.array(client.embeddings.create(model="embed", input=TEXTS[:2], dimensions=8).data[1].embedding)
    assert np.allclose(vectors[1, :8] / np.linalg.norm(vectors[1, :8]), short, atol=1e-5)
    one, two = (client.embeddings.create(model="embed", input=text).usage for text in ("a", ["a", "a"]))
    assert (3, 6) == (one.prompt_tokens, two.total_tokens)


def test_tokens_of_a_text_and_back(mesh: Mapping[str, Endpoint], client: openai.OpenAI) -> None:
    """As many as the usage of the same prompt; a chat is that of the model's template."""
    _, got = ask(
        mesh, "/tokenize", json.dumps({"model": "writer", "prompt": "Return the", "add_special_tokens": False})
    )
    assert len(got["tokens"]) == got["count"]
    assert (200, {"prompt": "Return the"}) == ask(
        mesh, "/detokenize", json.dumps({"model": "writer", "tokens": got["tokens"]})
    )
    messages = [{"role": "user", "content": "Return the"}]
    _, chat = ask(mesh, "/tokenize", json.dumps({"model": "writer", "messages": messages}))
    answer = client.chat.completions.create(model="writer", messages=messages, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == chat["count"]
    assert (200, {"prompt": ""}) == ask(mesh, "/detokenize", '{"model": "writer", "tokens": []}')
    assert (200, {"version": __version__}) == ask(mesh, "/version")


def test_several_answers_of_a_graph_are_calls_with_seeds_of_their_own(client: openai.OpenAI) -> None:
    """Each as the model itself gives it; the prompt is counted once; a fingerprint is that of the model."""
    options: dict[str, Any] = {"prompt": "Return the", "max_tokens": 8}
    got = client.completions.create(model="write", n=3, seed=5, **options)
    alone = [client.completions.create(model="write", seed=seed, **options) for seed in (5, 6, 7)]
    assert [one.choices[0].text for one in alone] == [choice.text for choice in got.choices]
    assert (alone[0].usage.prompt_tokens, 24) == (got.usage.prompt_tokens, got.usage.completion_tokens)
    own = client.completions.create(model="writer", **options)
    assert got.system_fingerprint == alone[0].system_fingerprint != own.system_fingerprint


def test_each_chunk_may_have_the_usage_so_far(client: openai.OpenAI) -> None:
    """With ``continuous_usage_stats``, as vLLM has it."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(model="writer", prompt="a", max_tokens=4, stream=True, stream_options=options)
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert sorted(counts) == counts
    assert (4, True) == (counts[-1], all(chunk.usage.prompt_tokens for chunk in chunks))


def test_what_embeds_is_listed_as_that(mesh: Mapping[str, Endpoint]) -> None:
    """A graph from a text; not those from bytes of a picture to probabilities."""
    _, listed = ask(mesh, "/v1/models")
    assert ["embed"] == [model["id"] for model in listed["data"] if "/v1/embeddings" in model["endpoints"]]
