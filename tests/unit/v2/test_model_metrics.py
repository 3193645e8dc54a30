"""What models of the services count for themselves, on the router's page."""

import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry

from weft.v2.server import model_metrics as metrics
from weft.v2.server.metrics import serve_metrics
from weft.v2.server.model_metrics import MetricsSource, ModelMetricsCollector

PAGE = """# HELP nv_inference_count Rows inferred
# TYPE nv_inference_count counter
nv_inference_count{model="m",version="1"} 3.0
# HELP weft_queue_size Requests in the queue
# TYPE weft_queue_size gauge
weft_queue_size{model="m"} 0.0
# HELP process_cpu_seconds_total Time
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 1.5
# HELP python_info Platform
# TYPE python_info gauge
python_info{version="3.11"} 1.0
# HELP app_calls Calls of the app
# TYPE app_calls counter
app_calls{part="x"} 4.0
# HELP app_answers_total Answers
# TYPE app_answers_total counter
app_answers_total 5.0
# HELP app_load Load
# TYPE app_load gauge
app_load{service="mine",text="a \\"b\\" \\n nv_"} 3.5
# HELP app_sizes Sizes
# TYPE app_sizes histogram
app_sizes_bucket{le="1.0"} 2.0
app_sizes_bucket{le="+Inf"} 3.0
app_sizes_sum 6.0
app_sizes_count 3.0
"""
OWN = PAGE[PAGE.index("# HELP app_calls") :]

Serve = Callable[[Callable[[], bytes]], str]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FETCH_TIMEOUT_S", 60.0)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves what a function gives as a page; the URL."""
    with ExitStack() as stack:

        def start(page: Callable[[], bytes]) -> str:
            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    body = page()
                    self.send_response(200 if body else 500)
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, format: str, *arguments: object) -> None: ...  # the library's name

            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}/metrics"

        yield start


def page_over(*sources: str) -> str:
    """The page of a router that asks these, without what the process is measured by."""
    registry = CollectorRegistry()
    registry.register(ModelMetricsCollector([MetricsSource.parse(source) for source in sources]))
    port = serve_metrics(registry, "127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def test_families_of_models_are_passed_on_as_they_are(serve: Serve) -> None:
    """Names, texts, types, labels and values; what every service has is left to the router's own."""
    assert page_over(serve(PAGE.encode)) == OWN


def test_a_service_with_a_name_has_series_of_its_own(serve: Serve) -> None:
    """Two replicas count the same thing; a label that is in the way is renamed, as Prometheus does."""
    url = serve(lambda: b'# HELP a A\n# TYPE a gauge\na 1.0\na{service="mine"} 2.0\n')
    assert page_over(f"model={url}", f"model-2={url}").splitlines()[2:] == [
        'a{service="model"} 1.0',
        'a{exported_service="mine",service="model"} 2.0',
        'a{service="model-2"} 1.0',
        'a{exported_service="mine",service="model-2"} 2.0',
    ]


def test_of_equal_series_the_first_counts(serve: Serve) -> None:
    """No page has a series twice, nor a family of two types."""
    first = serve(lambda: b"# HELP a A\n# TYPE a gauge\na 1.0\n# HELP b B\n# TYPE b gauge\nb 1.0\n")
    second = serve(lambda: b"# HELP a A\n# TYPE a gauge\na 2.0\n# HELP b B\n# TYPE b histogram\nb_sum 1.0\n")
    assert [line for line in page_over(first, second).splitlines() if line[0] != "#"] == ["a 1.0", "b 1.0"]


def test_who_does_not_answer_is_left_out(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, silent, failing, broken or too large: the others are there."""
    monkeypatch.setattr(metrics, "FETCH_TIMEOUT_S", 1.0)
    monkeypatch.setattr(metrics, "MAX_PAGE_BYTES", 10_000)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = [server.getsockname()[1] for server in (silent, closed)]
        bad = [
            *(f"http://127.0.0.1:{port}" for port in ports),
            serve(lambda: b""),
            serve(lambda: b"no metrics { at all"),
            serve(lambda: b"\xff"),
            serve(lambda: PAGE.encode() + b"#" * 20_000),
        ]
        assert page_over(*bad, serve(OWN.encode)) == OWN


def test_a_router_that_asks_itself_answers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page comes, and nothing goes on asking."""
    monkeypatch.setattr(metrics, "FETCH_TIMEOUT_S", 0.5)
    asked = []
    urls: list[str] = []
    collector: list[ModelMetricsCollector] = []

    def page() -> bytes:
        asked.append(1)
        return b"a %d\n" % len(list(collector[0].collect()))

    urls.append(serve(page))
    collector.append(ModelMetricsCollector([MetricsSource(urls[0])]))
    assert [family.name for family in collector[0].collect()] == ["a"]
    assert len(asked) == 1


def test_nobody_is_asked_before_a_scrape(serve: Serve) -> None:
    """A router starts without its services, and at once."""
    asked: list[int] = []
    collector = ModelMetricsCollector([MetricsSource(serve(lambda: asked.append(1) or b""))])  # type: ignore[func-returns-value]
    CollectorRegistry().register(collector)
    assert asked == []


@pytest.mark.parametrize(
    "text", ["", "model=", "127.0.0.1:1", "https://a/metrics", "http://", "http:///metrics", "http://a b", "http://a\n"]
)
def test_what_is_no_page_is_told(text: str) -> None:
    """The message has the value and an example."""
    with pytest.raises(ValueError, match=r"must be \[NAME=\]URL, for example http://127.0.0.1:8022/metrics"):
        MetricsSource.parse(text)


@pytest.mark.parametrize("text", ["http://a:1/metrics", "http://a/?b=c", "model-2=http://a:1/metrics"])
def test_a_source_is_written_as_it_is_read(text: str) -> None:
    """With a name or without."""
    assert MetricsSource.parse(text).text == text
