"""Decoupled graphs from end to end: tritonclient, a router process, and a model that tells how far ahead it got."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.routing import running_router
from tests.integration.streaming import Stream, TokenCore, mortal_service, text_input
from tests.processes import Running
from tests.unit.mesh.serving import serving
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

#: Graphs over the models of ``TokenCore``.
REPOSITORY = Path(__file__).with_name("data") / "streams"
#: Bytes of a response that two fill a gRPC window with; 300 are more than sockets hold, which take 38 MB at most, as
#: much as the kernel finds that a connection carries.
LARGE_BYTES = 256 << 10
NUM_LARGE, NUM_BUFFERED = 300, 200


@pytest.fixture(scope="module")
def models() -> TokenCore:
    return TokenCore()


@pytest.fixture(scope="module")
def router(models: TokenCore) -> Iterator[Running]:
    with serving(models, loop=models.loop) as address, running_router(REPOSITORY, address) as router:
        yield router


@pytest.fixture
def core(models: TokenCore) -> Iterator[TokenCore]:
    """The models; no call of theirs is in work when the test is over."""
    yield models
    models.until(lambda: models.num_open == 0)


@pytest.fixture
def stream(router: Running) -> Iterator[Stream]:
    """A stream to the router."""
    stream = Stream(router.grpc)
    yield stream
    stream.close(cancels=True)


def test_each_response_goes_through_the_graph_in_order(core: TokenCore, stream: Stream) -> None:
    """The end is told with the last response, or by an empty one for who asks for it."""
    stream.send("chat", "hi", "silent", count=4)
    assert [("silent", f"hi,pre.{n},post") for n in range(4)] == [stream.take()[:2] for _ in range(4)]
    stream.send("chat", "hi", "asking", asks_for_final=True, count=4)
    assert [("asking", f"hi,pre.{n},post") for n in range(4)] == stream.take_all()
    stream.send("chat", "hi", "none", asks_for_final=True, count=0)
    assert ("none", "", True) == stream.take()


def test_an_ensemble_streams_alike(core: TokenCore, stream: Stream) -> None:
    """That of Triton Inference Server, as its `config.pbtxt` has it; and so does the model by its own name."""
    for model, suffix in (("old", ",post"), ("llm", "")):
        stream.send(model, "hi", model, asks_for_final=True, count=3)
        assert [(model, f"hi.{n}{suffix}") for n in range(3)] == stream.take_all()


def test_many_requests_share_a_stream(core: TokenCore, stream: Stream) -> None:
    """Decoupled graphs side by side, each in its own order; what is not decoupled answers once, finally."""
    sent = [f"{number}" for number in range(20)]
    for name in sent:
        stream.send("wide", name, name, asks_for_final=True, count=10)
        stream.send("plain", name, f"plain {name}")
        stream.send("pre", name, f"pre {name}")
    got, num_ended = [], 0
    while num_ended < 3 * len(sent):
        got.append(stream.take())
        num_ended += got[-1][2]
    for name in sent:
        expected = [f"{name},pre.{n},post" for n in range(10)]
        assert expected == [text for request_id, text, _ in got if request_id == name and text]
    once = [(f"{kind} {name}", f"{name},pre", True) for name in sent for kind in ("plain", "pre")]
    assert once == [answer for answer in got if " " in answer[0]]


def test_streams_of_several_requests_are_interleaved(core: TokenCore, stream: Stream) -> None:
    """One that stands still holds up no other on the same stream."""
    stream.send("chat", "a", "a", count=3, hang_after=2)
    assert ["a", "a"] == [stream.take()[0] for _ in range(2)]
    stream.send("chat", "b", "b", count=3)
    assert ["b", "b", "b"] == [stream.take()[0] for _ in range(3)]
    assert 1 == core.num_open


@pytest.mark.parametrize("graph", ["wide", "outer", "merged"])
@pytest.mark.parametrize("hang_after", [2, 0])
def test_a_cancelled_stream_cancels_the_model(core: TokenCore, router: Running, graph: str, hang_after: int) -> None:
    """In mid stream and before the first response, also inside of graphs and of a merge."""
    stream = Stream(router.grpc)
    for name in "abc":
        stream.send(graph, name, f"{graph}{name}{hang_after}", count=9, hang_after=hang_after)
    for _ in range(3 * hang_after):
        stream.take()
    core.until(lambda: core.num_open == 3)
    stream.close(cancels=True)
    core.until(lambda: core.num_open == 0)


def test_a_client_that_vanishes_cancels_the_model(core: TokenCore, router: Running) -> None:
    """Killed, it says nothing more; the connection does."""
    script = (
        "import sys; from tests.integration.streaming import Stream; stream = Stream(sys.argv[1]); "
        "stream.send('chat', 'hi', 'killed', count=9, hang_after=2); print(stream.take(), flush=True); stream.take(); "
        "stream.take()"
    )
    with subprocess.Popen([sys.executable, "-c", script, router.grpc], stdout=subprocess.PIPE) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline()
            core.until(lambda: core.num_open == 1)
        finally:
            client.kill()
        core.until(lambda: core.num_open == 0)


def test_a_failure_in_mid_stream_is_that_requests_alone(core: TokenCore, stream: Stream) -> None:
    """Its responses, then an error that says status and place; the stream goes on for the others."""
    for name in ("chat", "wide"):
        stream.send(name, "a", "a", count=9, fail_after=3)
        assert [f"a,pre.{n},post" for n in range(3)] == [stream.take()[1] for _ in range(3)]
        assert f"{name}/1: root/llm -> llm@1: out of blocks" == stream.take()[1]
        stream.send(name, "b", "b", asks_for_final=True, count=1)
        assert [("b", "b,pre.0,post")] == stream.take_all()


def test_who_asks_for_a_status_gets_it_and_the_path(core: TokenCore, router: Running) -> None:
    """The metadata `triton_grpc_error` ends the stream with the first error."""
    stream = Stream(router.grpc, headers={"triton_grpc_error": "true"})
    stream.send("chat", "a", "a", count=9, fail_after=1)
    assert "a,pre.0,post" == stream.take()[1]
    text = stream.take()[1]
    assert "[StatusCode.RESOURCE_EXHAUSTED] chat/1: root/llm -> llm@1: out of blocks" == text
    stream.close(cancels=True)


def test_a_slow_client_slows_the_model_down(core: TokenCore, stream: Stream, router: Running) -> None:
    """Of 300 responses it has made but a few when the client does not read on; then all come, in order."""
    stream.is_reading.clear()
    stream.send("chat", "a", "slow", count=NUM_LARGE, num_bytes=LARGE_BYTES)
    stream.take()
    busy = Stream(router.grpc)
    for number in range(NUM_LARGE):  # while the router answers as many others
        busy.send("plain", "b", str(number))
        assert str(number) == busy.take()[0]
    busy.close()
    made = core.made["slow"]
    assert made < NUM_BUFFERED, made
    stream.is_reading.set()
    assert [f"a,pre.{n},post" for n in range(1, NUM_LARGE)] == [stream.take()[1] for _ in range(1, NUM_LARGE)]


@pytest.mark.parametrize(("graph", "limit"), [("chat", 1), ("wide", 4), ("old", 3)])
def test_so_many_responses_are_in_work(
    core: TokenCore, stream: Stream, router: Running, graph: str, limit: int
) -> None:
    """`max_inflight_responses`, and `max_inflight_requests` of ensembles: beyond it the model has to wait."""
    core.set_gate(is_open=False)
    core.most_posts, before = 0, core.made[graph]
    stream.send(graph, "a", graph, count=NUM_LARGE, num_bytes=LARGE_BYTES, limit=True)
    core.until(lambda: core.most_posts == limit)
    busy = Stream(router.grpc)
    for number in range(NUM_LARGE):
        busy.send("plain", "b", str(number))
        assert str(number) == busy.take()[0]
    busy.close()
    made = core.made[graph] - before
    assert made < NUM_BUFFERED, made
    core.set_gate(is_open=True)
    for number in range(NUM_LARGE):
        assert f".{number},post" == stream.take()[1].removeprefix("a").removeprefix(",pre")
    assert limit == core.most_posts


def test_a_deadline_passes_in_mid_stream(core: TokenCore, stream: Stream, router: Running) -> None:
    """That of the graph is the request's alone; that of the client's stream ends it, whichever side sees it first."""
    stream.send("brief", "a", "a", count=9, hang_after=2)
    assert ["a,pre.0,post", "a,pre.1,post"] == [stream.take()[1] for _ in range(2)]
    text = stream.take()[1]
    assert text.startswith("brief/1: root/llm -> llm@1: the stream of model 'llm' on target 'model'"), text
    stream.send("chat", "b", "b", count=1)
    assert "b,pre.0,post" == stream.take()[1]
    limited = Stream(router.grpc, stream_timeout=0.5)
    limited.send("chat", "a", "a", count=9, hang_after=2)
    assert ["a,pre.0,post", "a,pre.1,post"] == [limited.take()[1] for _ in range(2)]
    text = limited.take()[1]
    assert "DEADLINE_EXCEEDED" in text or "did not end within" in text, text
    limited.close()


def test_a_target_that_dies_in_mid_stream_is_named() -> None:
    """UNAVAILABLE with step, model and address; the stream goes on."""
    with mortal_service() as (address, target), running_router(REPOSITORY, address) as router:
        stream = Stream(router.grpc)
        stream.send("wide", "a", "a", count=9, hang_after=2)
        assert ["a,pre.0,post", "a,pre.1,post"] == [stream.take()[1] for _ in range(2)]
        target.kill()
        text = stream.take()[1]
        where = f"wide/1: root/llm -> llm@1: model 'llm' on target 'model' ({address}) cannot be reached"
        assert text.startswith(where), text
        stream.send("wide", "b", "b", count=1)
        assert "cannot be reached" in stream.take()[1]
        stream.close()


@pytest.mark.parametrize("name", ["chat", "old", "llm", "branch", "outer", "merged"])
def test_one_answer_is_not_to_be_had(core: TokenCore, router: Running, name: str) -> None:
    """A unary call of what is decoupled is UNIMPLEMENTED, in the words of Triton Inference Server."""
    with triton.InferenceServerClient(router.grpc) as client:
        assert client.get_model_config(name, as_json=True)["config"]["model_transaction_policy"]["decoupled"]
        with pytest.raises(InferenceServerException) as caught:
            client.infer(name, [text_input("hi")])
    assert "StatusCode.UNIMPLEMENTED" == caught.value.status()
    assert "ModelInfer RPC doesn't support models with decoupled transaction policy" == caught.value.message()


def test_one_answer_of_what_can_collect(core: TokenCore, router: Running) -> None:
    """A unary call reaches the model as one, also as a step of a graph; the configuration of both says that it can."""
    with triton.InferenceServerClient(router.grpc) as client:
        for name, expected in (("all", b"hi,all"), ("whole", b"hi,pre,all,post")):
            result = client.infer(name, [text_input("hi")], request_id="7", parameters={"graph_trace": True})
            response = result.get_response()
            assert ("7", expected) == (response.id, result.as_numpy(response.outputs[0].name)[0])
            assert response.parameters["graph_trace"].string_param
            config = client.get_model_config(name, as_json=True)["config"]
            assert {"string_value": "true"} == config["parameters"]["collects_responses"]


@pytest.mark.parametrize("name", ["all", "whole"])
def test_an_only_response_waits_for_no_request_before_it(core: TokenCore, stream: Stream, name: str) -> None:
    """On the same stream, of what is decoupled, as at the model itself."""
    core.set_gate(is_open=False)
    stream.send("all", "slow", "slow", limit=True)
    stream.send(name, "fast", "fast")
    assert "fast" == stream.take()[0]
    core.set_gate(is_open=True)
    assert "slow" == stream.take()[0]


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
