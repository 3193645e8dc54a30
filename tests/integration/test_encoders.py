"""Encoders in a mesh: folders with random weights, over OpenAI's interface and in a graph, against transformers."""

import contextlib
import http.client
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import torch
from tests.case_files import table
from tests.encoders import SPECIAL, WORDS, reference, save_encoder, save_tokenizer, write_json

from weft.mesh.running import running_mesh

PAGE = (Path(__file__).resolve().parents[2] / "docs/encoders.md").read_text()
TEXTS = [" ".join(WORDS[place : place + 1 + place % 7]) for place in range(70)]


def block(language: str) -> str:
    """The one block of code in this language on the page."""
    (code,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(code)


class Served(NamedTuple):
    url: str
    models: dict[str, Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("encoders")
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "embedder": ("RobertaModel", {"type_vocab_size": 1}),
        "ranker": ("BertForSequenceClassification", {"num_labels": 1}),
        "topics": ("ModernBertForSequenceClassification", {"num_labels": 3}),
    }
    models = {}
    for name, (architecture, fields) in kinds.items():
        folder = root / "model" / name / "1"
        models[name] = save_encoder(folder, architecture, **fields)
        save_tokenizer(folder)
        (folder.parent / "config.pbtxt").write_text('backend: "encoder"\n')
    said = {"prompts": {"query": "w7 w8 "}, "default_prompt_name": None}
    write_json(root / "model/embedder/1/config_sentence_transformers.json", said)
    (root / "graphs/around/1").mkdir(parents=True)
    (root / "graphs/around/1/graph.pbtxt").write_text(block("pbtxt"))
    with running_mesh(root, ["--http-port", "0"]) as mesh:
        yield Served(mesh["gateway"].http, models)


def ask(served: Served, path: str, body: Any = None) -> tuple[int, Any]:
    text = body if isinstance(body, str) else json.dumps(body) if body else ""
    with contextlib.closing(http.client.HTTPConnection(served.url, timeout=60)) as connection:
        connection.request("POST" if text else "GET", path, text or None, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def ids_of(text: str, pair: str | None = None) -> tuple[list[int], list[int]]:
    """What the tokenizer makes of a text or pair of ``WORDS``."""
    first, second = ([len(SPECIAL) + WORDS.index(word) for word in (each or "").split()] for each in (text, pair))
    ids = [2, *first, 3]
    return (ids, [0] * len(ids)) if pair is None else ([*ids, *second, 3], [0] * len(ids) + [1] * (len(second) + 1))


def vectors_of(served: Served, texts: Sequence[str]) -> Any:
    hidden = [reference(served.models["embedder"], *ids_of(text), is_hidden=True).mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(hidden)).numpy()


def scores_of(served: Served, pairs: Sequence[tuple[str, str]]) -> list[float]:
    model = served.models["ranker"]
    return [reference(model, *ids_of(*pair), is_hidden=False).sigmoid().item() for pair in pairs]


@pytest.mark.parametrize(("_kind", "text", "words"), table(Path(__file__).with_name("encoder_bodies.txt")))
def test_what_does_not_fit_is_refused(served: Served, _kind: str, text: str, words: str) -> None:
    """With a status, and what to do."""
    path, _, body = text.partition(" ")
    status, answer = ask(served, path, body)
    assert words[:4] == f"{status} "
    assert words[4:] in answer["error"]["message"]


def test_models_are_listed_with_their_endpoints(served: Served) -> None:
    """A classifier of one text has none of these."""
    _, listed = ask(served, "/v1/models")
    endpoints = {model["id"]: model["endpoints"] for model in listed["data"]}
    scores = ["/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"]
    assert {"around": ["/v1/embeddings"], "embedder": ["/v1/embeddings"], "ranker": scores} == endpoints
    assert scores == ask(served, "/v1/models/ranker")[1]["endpoints"]
    assert ask(served, "/v1/models/topics")[0] == 404


@pytest.mark.parametrize("model", ["embedder", "around"])
def test_embeddings_are_those_of_transformers(served: Served, model: str) -> None:
    """Of more texts than fit a batch, of a model and of a graph; the usage counts their tokens."""
    with openai.OpenAI(base_url=f"http://{served.url}/v1", api_key="none", max_retries=0) as client:
        got = client.embeddings.create(model=model, input=TEXTS)
    np.testing.assert_allclose([one.embedding for one in got.data], vectors_of(served, TEXTS), atol=1e-4)
    assert got.usage.prompt_tokens == sum(len(ids_of(text)[0]) for text in TEXTS)


def test_token_ids_prompts_and_truncation(served: Served) -> None:
    """Ids stand for a text, a prompt goes before it, and one that is too long is refused or cut."""

    def vectors(given: Any, **fields: Any) -> Any:
        status, answer = ask(served, "/v1/embeddings", {"model": "embedder", "input": given, **fields})
        return [one["embedding"] for one in answer["data"]] if status == 200 else answer["error"]["message"]

    ids = [ids_of(text)[0] for text in TEXTS[:5]]
    np.testing.assert_allclose(vectors(ids), vectors_of(served, TEXTS[:5]), atol=1e-4)
    prompted = vectors_of(served, ["w7 w8 w1", "w7 w8 w2"])
    np.testing.assert_allclose(vectors(["w1", "w2"], prompt_name="query"), prompted, atol=1e-4)
    long = " ".join(WORDS * 3)
    assert "row 1 has 362 tokens; 1 to 299 are allowed" in vectors(["w1", long])
    assert "has 362 tokens" in vectors([ids_of(long)[0]], truncate_prompt_tokens=-1)
    for limit, num_words in ((-1, 297), (10, 8)):
        cut = vectors_of(served, ["w1", " ".join(long.split()[:num_words])])
        np.testing.assert_allclose(vectors(["w1", long], truncate_prompt_tokens=limit), cut, atol=1e-4)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(served: Served, path: str) -> None:
    """The best first, and only ``top_n``; documents are strings or objects."""
    documents = [{"text": TEXTS[0]}, *TEXTS[1:40]]
    body = {"model": "ranker", "query": "w1 w2 w3", "documents": documents}
    status, got = ask(served, path, body)
    scores = scores_of(served, [("w1 w2 w3", text) for text in TEXTS[:40]])
    assert (200, "ranker", "rerank-") == (status, got["model"], got["id"][:7])
    assert sorted(range(40), key=lambda index: -scores[index]) == [one["index"] for one in got["results"]]
    found = [one["relevance_score"] for one in got["results"]]
    np.testing.assert_allclose(found, sorted(scores, reverse=True), atol=1e-4)
    assert [TEXTS[one["index"]] for one in got["results"]] == [one["document"]["text"] for one in got["results"]]
    num_tokens = sum(len(ids_of("w1 w2 w3", text)[0]) for text in TEXTS[:40])
    assert {"prompt_tokens": num_tokens, "total_tokens": num_tokens} == got["usage"]
    _, few = ask(served, path, body | {"top_n": 2, "return_documents": False})
    assert [{"index", "relevance_score"}] * 2 == [set(one) for one in few["results"]]
    assert few["results"][1]["index"] == got["results"][1]["index"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_those_of_pairs(served: Served, path: str) -> None:
    """Of one text with each of several, or of as many."""
    for left, right in (("w1 w2", TEXTS[:3]), (TEXTS[3:6], TEXTS[:3]), ("w1", "w2")):
        status, got = ask(served, path, {"model": "ranker", "text_1": left, "text_2": right})
        rights = [right] if isinstance(right, str) else right
        lefts = [left] * len(rights) if isinstance(left, str) else left
        assert (200, "list", "ranker") == (status, got["object"], got["model"])
        assert [*range(len(rights))] == [one["index"] for one in got["data"]]
        wanted = scores_of(served, list(zip(lefts, rights, strict=True)))
        np.testing.assert_allclose([one["score"] for one in got["data"]], wanted, atol=1e-4)


def test_the_program_of_the_page_runs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints widths, tokens, the best two documents, and scores."""
    names: dict[str, Any] = {}
    exec(compile(block("python").replace("localhost:8000", served.url), "docs/encoders.md", "exec"), names)
    names["client"].close()
    first, *best, last = capsys.readouterr().out.splitlines()
    assert "[8, 8] 7" == first
    wanted = scores_of(served, [("w1 w2", text) for text in ("w3", "w1 w2 w4", "w1")])
    assert sorted(range(3), key=lambda index: -wanted[index])[:2] == [int(line[0]) for line in best]
    np.testing.assert_allclose(json.loads(last), wanted[:2], atol=1e-4)
