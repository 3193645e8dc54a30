"""Decoupled models inside branches, nested graphs and merges: tritonclient, a router process, a service of models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.routing import Router, running_router, write
from tests.integration.streaming import Stream, TokenCore, TokenService, text_input
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

TEXTS = "data_type: TYPE_STRING dims: [ 1 ]"


def graph(name: str, nodes: str) -> str:
    """A graph of TEXT and OUT with these nodes."""
    return f"""name: "{name}" platform: "graph"
input [ {{ name: "TEXT" {TEXTS} }} ] output [ {{ name: "OUT" {TEXTS} }} ] {nodes}"""


BRANCH = graph(
    "branch",
    """node { name: "root" switch { on: 'get(parameters, "kind", "chat")'
      step { name: "chat" case: "chat" model_name: "llm" fallback { model_name: "all" } }
      step { name: "once" otherwise: true model_name: "pre" } } }""",
)
OUTER = graph(
    "outer",
    """import { graph: "branch" version: 1 as: "b" }
    node { name: "root" sequence {
      step { name: "first" model_name: "pre" output_map { key: "OUT" value: "P" } }
      step { name: "talk" graph: "b" input_map { key: "TEXT" value: "P" } output_map { key: "OUT" value: "T" } }
      step { name: "last" model_name: "post" input_map { key: "TEXT" value: "T" } } } }""",
)
MERGED = graph(
    "merged",
    """node { name: "root" ensemble { step { model_name: "llm" } step { model_name: "pre" }
      combine { output: "OUT" method: MERGE } } }""",
)


@pytest.fixture(scope="module")
def service() -> Iterator[TokenService]:
    service = TokenService()
    yield service
    service.close()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, service: TokenService) -> Iterator[Router]:
    root: Path = tmp_path_factory.mktemp("graphs")
    for name, text in (("branch", BRANCH), ("outer", OUTER), ("merged", MERGED)):
        write(root, text, name)
    with running_router(root, service.address) as router:
        yield router


def test_the_branch_that_a_request_takes_streams_or_not(core: TokenCore, stream: Stream) -> None:
    """Through an imported graph as well; the end is told with the last response, or by an empty one to who asks."""
    stream.send("branch", "hi", "chat", asks_for_final=True, count=3)
    assert [("chat", f"hi.{n}") for n in range(3)] == stream.take_all()
    stream.send("branch", "hi", "once", asks_for_final=True, kind="once")
    assert [("once", "hi,pre")] == stream.take_all()
    stream.send("outer", "hi", "nested", asks_for_final=True, count=3)
    assert [("nested", f"hi,pre.{n},post") for n in range(3)] == stream.take_all()
    stream.send("outer", "hi", "none", asks_for_final=True, count=0)
    assert ("none", "", True) == stream.take()


def test_a_fallback_stands_in_before_the_first_response_alone(core: TokenCore, stream: Stream) -> None:
    """Later the error is the request's, and the stream goes on for others."""
    stream.send("outer", "hi", "early", asks_for_final=True, count=3, fail_after=0)
    assert [("early", "hi,pre.0,post")] == stream.take_all()
    stream.send("branch", "hi", "late", count=3, fail_after=2)
    assert ["hi.0", "hi.1"] == [stream.take()[1] for _ in range(2)]
    assert "branch/1: root[chat] -> llm@1: out of blocks" == stream.take()[1]


def test_merged_responses_come_as_they_arrive(core: TokenCore, stream: Stream) -> None:
    """A model that hangs holds up no other; those of one model keep their order."""
    stream.send("merged", "hi", "m", asks_for_final=True, count=4)
    got = [text for _, text in stream.take_all()]
    assert (["hi,pre", *(f"hi.{n}" for n in range(4))], [f"hi.{n}" for n in range(4)]) == (
        sorted(got),
        [text for text in got if text != "hi,pre"],
    )
    stream.send("merged", "hi", "hangs", count=4, hang_after=0)
    assert "hi,pre" == stream.take()[1]


def test_a_client_that_cancels_ends_the_models_inside(core: TokenCore, router: Router) -> None:
    """In a nested graph and in a merge, in mid stream and before the first response."""
    for name in ("outer", "merged"):
        for hang_after in (0, 2):
            stream = Stream(router.grpc)
            stream.send(name, "hi", f"{name}{hang_after}", count=9, hang_after=hang_after)
            for _ in range(hang_after):
                stream.take()
            core.until(lambda: core.num_open == 1)
            stream.close(cancels=True)
            core.until(lambda: core.num_open == 0)


def test_one_answer_is_not_to_be_had_of_a_graph_that_cannot_collect(core: TokenCore, router: Router) -> None:
    """It is decoupled by what it runs, said in its configuration."""
    with triton.InferenceServerClient(router.grpc) as client:
        for name in ("branch", "outer", "merged"):
            assert client.get_model_config(name, as_json=True)["config"]["model_transaction_policy"]["decoupled"]
            with pytest.raises(InferenceServerException) as caught:
                client.infer(name, [text_input("hi")])
            assert "StatusCode.UNIMPLEMENTED" == caught.value.status()
