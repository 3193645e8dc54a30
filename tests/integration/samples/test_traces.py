"""One request through four processes is one trace, received by a real OTLP collector."""

from typing import Any

import grpc
import pytest

from weft.base.tensors import encode_bytes
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
#: Of a request that is answered by a stream.
STREAM_TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
#: Of one that fails.
FAILED_TRACE_ID = "7d4d9b2f0c1e4a5b8f6a3c2d1e0f9a8b"
PARENT_ID = "b7ad6b7169203331"
#: Spans of two threads are told by clocks that are read one after the other, on a machine that may be busy in between.
CLOCKS_APART_NS = 20_000_000

#: Calls that a `triage` request makes, in order: step path, service, model.
CALLS = [
    ("root/embed/root/tokenize", "preprocess", "tokenize_minilm"),
    ("root/embed/root/encode", "model", "minilm"),
    ("root/embed/root/pool", "postprocess", "mean_pool"),
    ("root/score", "model", "support_labels"),
    ("root/label", "postprocess", "triage_label"),
    ("root/answer/by_team[billing]", "postprocess", "answer_billing"),
]


def message(graph: str, name: str, data: bytes) -> pb.ModelInferRequest:
    """A request of one BYTES element."""
    request = pb.ModelInferRequest(model_name=graph, id="trace-me")
    request.inputs.add(name=name, datatype="BYTES", shape=(1, 1))
    request.raw_input_contents.append(encode_bytes([data]))
    return request


def prompt() -> pb.ModelInferRequest:
    """A text that is to be continued by five tokens, one in each response."""
    request = pb.ModelInferRequest(model_name="write", id="trace-me")
    sampling = b'{"max_tokens": 5, "ignore_eos": true}'
    for name, datatype, data in (
        ("text_input", "BYTES", encode_bytes([b"The module provides"])),
        ("sampling_parameters", "BYTES", encode_bytes([sampling])),
        ("stream", "BOOL", b"\1"),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=(1,))
        request.raw_input_contents.append(data)
    return request


#: Spans that end last.
LAST = {
    ("weft.router/triage", TRACE_ID),
    ("compute", TRACE_ID),
    ("weft.router/digits", FAILED_TRACE_ID),
    ("weft.preprocess/decode_digit", FAILED_TRACE_ID),
    ("weft.router/write", STREAM_TRACE_ID),
    ("weft.model/writer", STREAM_TRACE_ID),
    ("weft.postprocess/detokenize_writer", STREAM_TRACE_ID),
}


def parent(trace_id: str) -> tuple[tuple[str, str]]:
    """Metadata of a client that asks for a trace."""
    return (("traceparent", f"00-{trace_id}-{PARENT_ID}-01"),)


def described(span: Any) -> str:
    """Name, kind and trace of a span, for messages."""
    return f"{span.name} {span.kind} of {span.trace_id}"


def test_a_triage_request_is_one_tree_of_spans_across_four_processes(
    collector: Any, stub: GRPCInferenceServiceStub
) -> None:
    """Trace id, parents, kinds and attributes are right down to each batch; a client's mistake is no server's ERROR.

    A stream has few spans, whatever its length; the generation is one, with its first token and its responses.
    """
    complaint = message("triage", "TEXT", b"I was charged twice for my subscription, please refund me.")
    complaint.parameters["priority"].uint64_param = 1
    stub.ModelInfer(complaint, metadata=parent(TRACE_ID), timeout=30)
    list(stub.ModelStreamInfer(iter([prompt()]), metadata=parent(STREAM_TRACE_ID), timeout=30))
    with pytest.raises(grpc.RpcError) as failed:
        stub.ModelInfer(message("digits", "IMAGE", b"no image"), metadata=parent(FAILED_TRACE_ID), timeout=30)
    assert FAILED_TRACE_ID == dict(failed.value.trailing_metadata())["x-trace-id"]
    collector.wait_for(lambda spans: {(span.name, span.trace_id) for span in spans} >= LAST, 30)
    spans = [span for span in collector.spans if span.trace_id == TRACE_ID]
    by_id = {span.span_id: span for span in spans}
    children: dict[str, list[Any]] = {}
    for span in spans:
        children.setdefault(span.parent_span_id, []).append(span)

    (root,) = children[PARENT_ID]
    assert (root.name, root.kind, root.status) == ("weft.router/triage", "SERVER", "UNSET")
    assert root.resource["service.name"] == "weft.router"
    assert {span.parent_span_id for span in spans} - set(by_id) == {PARENT_ID}, "every other parent is known"

    calls = sorted((span for span in spans if span.kind == "CLIENT"), key=lambda span: span.start_unix_ns)
    assert [(span.attributes["weft.path"], span.attributes["weft.model"]) for span in calls] == [
        (path, model) for path, _, model in CALLS
    ]
    for call, (_, service, model) in zip(calls, CALLS, strict=True):
        assert call.attributes["weft.attempt"] == 1
        assert call.attributes["weft.target"] == service
        assert str(call.attributes["server.address"]).endswith(f"/{service}.sock")
        (server,) = children[call.span_id]
        assert (server.name, server.kind) == (f"weft.{service}/{model}", "SERVER")
        assert server.resource["service.name"] == f"weft.{service}"
        assert server.start_unix_ns >= call.start_unix_ns
        assert server.end_unix_ns <= call.end_unix_ns
        parts = {span.name: span for span in children[server.span_id]}
        assert {"queue", "batch", "compute"} <= set(parts), parts.keys()
        assert (TRACE_ID, server.span_id) in parts["batch"].links
        assert (TRACE_ID, parts["batch"].span_id) in parts["compute"].links
        assert parts["batch"].attributes["weft.batch_size"] == 1
        assert parts["queue"].end_unix_ns <= parts["compute"].start_unix_ns + CLOCKS_APART_NS
    assert len({span.resource["service.instance.id"] for span in spans}) == 4
    branch = next(span for span in spans if "weft.branch" in span.attributes)
    assert (branch.kind, branch.attributes["weft.branch"]) == ("INTERNAL", "billing")
    encode_queue = next(
        span for span in spans if span.name == "queue" and by_id[span.parent_span_id].name == "weft.model/minilm"
    )
    assert encode_queue.attributes["weft.priority"] == 1

    broken = {span.name: span for span in collector.spans if span.trace_id == FAILED_TRACE_ID}
    errors = {name: span for name, span in broken.items() if span.status == "ERROR"}
    assert {"CLIENT"} == {span.kind for span in errors.values()}, [described(s) for s in broken.values()]
    for name in ("weft.router/digits", "weft.preprocess/decode_digit"):
        assert broken[name].attributes["rpc.grpc.status_code"] == 3
    stream = [span for span in collector.spans if span.trace_id == STREAM_TRACE_ID]
    streamed = {span.name: span for span in stream}
    assert len(stream) <= 16, [described(span) for span in stream]
    generation = streamed["text_completion writer"]
    assert streamed["weft.model/writer"].end_unix_ns <= streamed["step root/write"].end_unix_ns
    assert streamed["weft.model/writer"].span_id == generation.parent_span_id
    assert {"weft.router/write", "weft.preprocess/tokenize_writer", "weft.postprocess/detokenize_writer"} <= set(
        streamed
    )
    assert (4, 5) == tuple(generation.attributes[f"gen_ai.usage.{kind}_tokens"] for kind in ("input", "output"))
    assert ["first_token", *["response"] * (len(generation.events) - 1)] == [name for name, _ in generation.events]
    (queue,) = (
        span for span in collector.spans if (span.name, span.parent_span_id) == ("queue", generation.parent_span_id)
    )
    assert queue.end_unix_ns <= generation.start_unix_ns + CLOCKS_APART_NS

    failed_call = next(span for span in errors.values() if span.kind == "CLIENT")
    assert failed_call.attributes["weft.model"] == "decode_digit"
    assert (failed_call.attributes["rpc.grpc.status_code"], failed_call.attributes["error.type"]) == (
        3,
        "INVALID_ARGUMENT",
    )
    assert any(name == "exception" for name, _ in failed_call.events)
