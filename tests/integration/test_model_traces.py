"""Python models see their trace: the span of their execution is current, and what they record is within it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tests.conftest import CollectedSpan, OtlpCollector, collecting
from tests.processes import wait_until

from weft.mesh.running import running_mesh

TRACE_ID = "0af7651916cd43dd8448eb211c80319{}"
PARENT_ID = "b7ad6b7169203331"
CONFIG = """
backend: "python"
max_batch_size: {rows}
input {{ name: "X" data_type: TYPE_FP32 dims: [1] }}
output {{ name: "SEEN" data_type: TYPE_STRING dims: [1] }}
{more}
"""
#: Tells what it sees of its trace, and opens a span in which it calls the model ``callee``, unless it is inline.
MODEL = """
import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils
from opentelemetry import trace

tracer = trace.get_tracer("of.the.model")


def seen_by(request):
    context = trace.get_current_span().get_span_context()
    current = f"{{context.span_id:016x}}" if context.is_valid else ""
    return pb_utils.Tensor("SEEN", np.array([[json.dumps([request.trace().get_context(), current])]], np.object_))


class TritonPythonModel:
    {execute}
"""
EXECUTE = """def execute(self, requests):
        trace.get_current_span().set_attribute("model.weights", [1, 2])
        trace.get_current_span().add_event("begun", {"model.step": 1})
        with tracer.start_as_current_span("look up") as span:
            span.set_attribute("model.key", "k")
            {call}
        print("a line of the model")
        return [pb_utils.InferenceResponse([seen_by(request)]) for request in requests]
"""
CALL = """tensor = pb_utils.Tensor("X", np.array([[1]], np.float32))
            request = pb_utils.InferenceRequest(model_name="callee", inputs=[tensor], requested_output_names=["SEEN"])
            {answer}
            assert not answer.has_error(), answer.error().message()"""
DECOUPLED = """def execute(self, requests):
        trace.get_current_span().set_attribute("model.weights", [1, 2])
        for request in requests:
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([seen_by(request)]))
            sender.send(flags=1)
"""
CALLEE = "def execute(self, requests):\n        return [pb_utils.InferenceResponse([seen_by(r)]) for r in requests]\n"
_CALLS = EXECUTE.replace("{call}", CALL.replace("{answer}", "answer = request.exec()"))
_AWAITS = EXECUTE.replace("{call}", CALL.replace("{answer}", "answer = await request.async_exec()"))
#: The body of each model, and what its configuration has beside that of the others.
MODELS = {
    "process": (_CALLS, ""),
    "thread": (_CALLS, 'parameters { key: "EXECUTION" value { string_value: "thread" } }'),
    "inline": (EXECUTE.replace("{call}", "pass"), 'parameters { key: "EXECUTION" value { string_value: "inline" } }'),
    "coroutine": ("async " + _AWAITS, ""),
    "decoupled": (DECOUPLED, "model_transaction_policy { decoupled: true }"),
    "callee": (CALLEE, ""),
    "batch": (CALLEE, "dynamic_batching { max_queue_delay_microseconds: 5000000 preferred_batch_size: 2 }"),
}


@contextmanager
def mesh_of_models(folder: Path) -> Iterator[tuple[tritonclient.grpc.InferenceServerClient, Path]]:
    """A mesh of the models; a client of its router, and the log."""
    repository, log = folder / "repository", folder / "log"
    for name, (execute, more) in MODELS.items():
        version = repository / name / "1"
        version.mkdir(parents=True)
        rows = 2 if name == "batch" else 1
        (repository / name / "config.pbtxt").write_text(CONFIG.format(rows=rows, more=more))
        (version / "model.py").write_text(MODEL.format(execute=execute).replace("{{", "{").replace("}}", "}"))
    with (
        log.open("w") as stream,
        running_mesh(repository, log=stream) as endpoints,
        tritonclient.grpc.InferenceServerClient(endpoints["router"].grpc) as client,
    ):
        yield client, log


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The mesh, with a collector of its spans."""
    with (
        pytest.MonkeyPatch.context() as environment,
        collecting(environment) as collector,
        mesh_of_models(tmp_path_factory.mktemp("traced")) as (client, log),
    ):
        yield client, collector, log


def ask(client: Any, model: str, trace_id: str = "") -> Any:
    """Send a request; the trace context and the current span that the model saw."""
    tensor = tritonclient.grpc.InferInput("X", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"} if trace_id else {}
    if model != "decoupled":
        answer = client.infer(model, [tensor], headers=headers, request_id=f"ask-{model}")
    else:
        answers: list[Any] = []
        client.start_stream(lambda result, error: answers.append(error or result), headers=headers)
        client.async_stream_infer(model, [tensor], request_id=f"ask-{model}")
        client.stop_stream()
        answer = answers[0]
    return json.loads(answer.as_numpy("SEEN").item())


def spans_of(collector: OtlpCollector, trace_id: str, *names: str) -> list[CollectedSpan]:
    """The spans of a trace with these names, in their order, once all are there."""

    def found(spans: list[CollectedSpan]) -> list[CollectedSpan]:
        return [span for name in names for span in spans if (span.name, span.trace_id) == (name, trace_id)]

    return found(collector.wait_for(lambda spans: len(found(spans)) >= len(names)))


@pytest.mark.parametrize("model", ["process", "thread", "inline", "coroutine"])
def test_the_span_of_an_execution_is_current(traced: Any, model: str) -> None:
    """Its id is that of `get_context`; attributes, events, spans and calls of the model are within it, in one trace."""
    client, collector, _ = traced
    trace_id = TRACE_ID.format(list(MODELS).index(model))
    context, current = ask(client, model, trace_id)
    assert {"traceparent": f"00-{trace_id}-{current}-01"} == json.loads(context)
    server, own = spans_of(collector, trace_id, f"weft.model/{model}", "look up")
    collector.wait_for(lambda spans: any(span.span_id == current for span in spans))
    (compute,) = [span for span in spans_of(collector, trace_id, "compute") if span.span_id == current]
    assert server.span_id == compute.parent_span_id
    assert [1, 2] == compute.attributes["model.weights"]
    assert [("begun", {"model.step": 1})] == compute.events
    assert (compute.span_id, "k") == (own.parent_span_id, own.attributes["model.key"])
    assert "weft.model" == own.resource["service.name"]
    assert compute.start_unix_ns <= own.start_unix_ns <= own.end_unix_ns <= compute.end_unix_ns + 20_000_000
    if model != "inline":
        nested, router = spans_of(collector, trace_id, "callee", "weft.router/callee")
        assert ("CLIENT", own.span_id) == (nested.kind, nested.parent_span_id)
        assert nested.span_id == router.parent_span_id


def test_of_a_decoupled_model_too(traced: Any) -> None:
    """Its `compute` lasts until the last response, and has what `execute` has added to it."""
    client, collector, _ = traced
    trace_id = TRACE_ID.format("a")
    context, current = ask(client, "decoupled", trace_id)
    (compute,) = spans_of(collector, trace_id, "compute")
    assert (current, [1, 2], 2) == (
        compute.span_id, compute.attributes["model.weights"], compute.attributes["weft.num_responses"]
    )  # fmt: skip
    assert current in context


def test_each_request_of_a_batch_has_its_own_trace(traced: Any) -> None:
    """`get_context` is of the request; the current span is that of the first."""
    client, collector, _ = traced
    tensor = tritonclient.grpc.InferInput("X", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    traces = [TRACE_ID.format(letter) for letter in "bc"]
    for trace_id in traces:
        headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}
        client.async_infer("batch", [tensor], lambda result, error: None, headers=headers)
    computes = {trace: spans_of(collector, trace, "compute")[0] for trace in traces}
    assert {2} == {span.attributes["weft.batch_size"] for span in computes.values()}
    assert 2 == len({span.span_id for span in computes.values()})


def test_log_lines_of_a_model_name_its_request_and_span(traced: Any) -> None:
    """What it prints too: service, process, request id, trace and span."""
    client, _, log = traced
    trace_id = TRACE_ID.format("d")
    _, current = ask(client, "process", trace_id)

    def printed() -> list[dict[str, Any]]:
        """What the model printed; it comes by another way than its answer."""
        lines = [json.loads(line) for line in log.read_text().splitlines() if trace_id in line]
        return [line for line in lines if line["message"] == "a line of the model"]

    wait_until(printed)
    (line,) = printed()
    assert ("model", "ask-process", trace_id, current) == (
        line["service"], line["request_id"], line["trace_id"], line["span_id"]
    )  # fmt: skip
    assert Path(f"/proc/{line['pid']}/cmdline").read_text().count("weft.serving.backends.python.child") == 1


def test_without_a_collector_the_context_is_that_of_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No span is current; `get_context` is None without a trace, and what the client sent with one."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with mesh_of_models(tmp_path) as (client, _):
        for model in ("process", "thread"):
            assert [None, ""] == ask(client, model)
            context, current = ask(client, model, TRACE_ID.format("0"))
            assert ({"traceparent": f"00-{TRACE_ID.format('0')}-{PARENT_ID}-01"}, "") == (json.loads(context), current)
