"""Calls through Envoy, nginx and HAProxy, each as docs/proxies.md configures it, and what stops behind them cost."""

import asyncio
import http.client
import json
import queue
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.certificates import Authority
from tests.faults.mesh import Service, wait_serving
from tests.integration.proxies import LANGUAGES, NUM_WORKERS, RETRIES, ProxiedCore, Proxy, load, request, running_proxy
from tests.integration.routing import naming_service
from tests.integration.talking import running_gateway
from tests.messages import request_from_call
from tests.processes import WAIT_S, running, wait_until
from tests.wire.clients.echo_model import running_echo_model

from weft.base.core import InferCall
from weft.base.tensors import encode
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

pytestmark = pytest.mark.long
CORE = ProxiedCore()
PROXIES = pytest.mark.parametrize("name", LANGUAGES)


@pytest.fixture(scope="module")
def models() -> Iterator[str]:
    """Address of a service of ``CORE``."""
    with naming_service(CORE) as address:
        yield address


@pytest.fixture(scope="module")
def routers(models: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    """Two before it, on ports that they keep."""
    folder = tmp_path_factory.mktemp("routers")
    (folder / "graphs").mkdir()
    arguments = ["--repository", str(folder / "graphs"), f"--target=model={models}"]
    services = [Service("weft.services.router", arguments, folder / f"router-{number}.log") for number in (1, 2)]
    for service in services:
        service.start()
    try:
        for service in services:
            wait_serving(service.address)
        yield services
    finally:
        for service in services:
            service.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def gateway(routers: list[Service]) -> Iterator[str]:
    """Address of a gateway before the first router."""
    with running_gateway(routers[0].address) as gateway:
        yield gateway.address


@pytest.fixture(scope="module", params=LANGUAGES)
def proxy(
    request: pytest.FixtureRequest, routers: list[Service], gateway: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    """Each proxy before the routers and the gateway; its checks have found them."""
    folder = tmp_path_factory.mktemp(request.param)
    with running_proxy(request.param, folder, *(router.address for router in routers), gateway) as proxy:
        wait_serving(proxy.grpc)
        wait_until(lambda: get(proxy, "/health") == 200, "the gateway's health")
        yield proxy


def get(proxy: Proxy, path: str) -> int:
    """Status of an answer."""
    connection = http.client.HTTPConnection(proxy.http, timeout=WAIT_S)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def test_messages_of_32_mb_pass_both_ways(proxy: Proxy) -> None:
    """And are what was sent."""
    data = np.random.default_rng(1).integers(0, 256, 32_000_000, np.uint8)
    with proxy.stub() as stub:
        answer = stub.ModelInfer(request("echo", data), timeout=4 * WAIT_S)
    assert answer.raw_output_contents[0] == data.tobytes()


def test_a_stream_answers_before_its_client_has_sent_all(proxy: Proxy) -> None:
    """The second request is sent once the first is answered; the stream then ends with OK."""
    sent: queue.SimpleQueue[object] = queue.SimpleQueue()
    with proxy.stub() as stub:
        stream = stub.ModelStreamInfer(iter(sent.get, None), timeout=WAIT_S)
        for _ in range(3):
            sent.put(request("echo"))
            assert next(stream).infer_response.raw_output_contents[0] == b"\1\2\3"
        sent.put(None)
        assert [] == list(stream)
    assert stream.code() is grpc.StatusCode.OK


def test_a_cancel_ends_the_call_of_the_model(proxy: Proxy) -> None:
    """Of a unary call as of a stream."""
    with proxy.stub() as stub:
        sent: queue.SimpleQueue[object] = queue.SimpleQueue()
        sent.put(request("hang"))
        for start in (
            lambda: stub.ModelInfer.future(request("hang")),
            lambda: stub.ModelStreamInfer(iter(sent.get, None)),
        ):
            call = start()
            CORE.until(lambda: CORE.num_open == 1)
            call.cancel()
            CORE.until(lambda: CORE.num_open == 0)
        sent.put(None)


def test_a_deadline_reaches_the_model(proxy: Proxy) -> None:
    """It is no later than the client's, which gets DEADLINE_EXCEEDED; nothing is left in work."""
    with proxy.stub() as stub, pytest.raises(grpc.RpcError) as end:
        stub.ModelInfer(request("hang"), timeout=2)
    assert end.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    CORE.until(lambda: CORE.num_open == 0)


def test_refused_calls_are_repeated(proxy: Proxy) -> None:
    """UNAVAILABLE by the policy of the page, or by Envoy, which also repeats it for a client without one."""
    num_before = len(CORE.calls)
    with proxy.stub(*RETRIES) as stub:
        stub.ModelInfer(request("busy"), timeout=WAIT_S)
    assert len(CORE.calls) - num_before == 3


def test_an_answer_of_the_gateway_comes_word_by_word(proxy: Proxy) -> None:
    """Words are read while the model has not ended; who leaves ends its call."""
    connection = http.client.HTTPConnection(proxy.http, timeout=WAIT_S)
    body = {"model": "plain", "prompt": "one two HANG", "stream": True, "max_tokens": 9}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    lines = (line for line in response if line.startswith(b"data:"))
    words = [json.loads(next(lines)[5:])["choices"][0]["text"] for _ in range(2)]
    assert (["one ", "two "], 1) == (words, CORE.num_open)
    response.close()
    connection.close()
    CORE.until(lambda: CORE.num_open == 0)


def test_envoy_takes_grpc_web(proxy: Proxy) -> None:
    """Over HTTP/1.1: a message, and trailers as a frame of the body."""
    if proxy.name != "envoy":
        pytest.skip("no filter for it")
    data = request("echo").SerializeToString()
    connection = http.client.HTTPConnection(proxy.grpc, timeout=WAIT_S)
    connection.request(
        "POST", "/inference.GRPCInferenceService/ModelInfer", b"\0" + len(data).to_bytes(4, "big") + data,
        {"content-type": "application/grpc-web+proto", "x-grpc-web": "1"},
    )  # fmt: skip
    body = connection.getresponse().read()
    connection.close()
    end = 5 + int.from_bytes(body[1:5], "big")
    assert (b"\1\2\3" in body[5:end], 0x80, True) == (True, body[end], b"grpc-status:0" in body[end:])


@PROXIES
def test_the_proxy_shows_a_certificate_to_the_router_and_checks_its(name: str, models: str, tmp_path: Path) -> None:
    """A router that wants one answers; one whose certificate is of another name gets no call."""
    authority = Authority(tmp_path)
    pair = authority.issue("proxy")
    pair.cert.write_bytes(pair.cert.read_bytes() + pair.key.read_bytes())  # as HAProxy wants it
    for server, answers in (("router", True), ("other", False)):
        own = authority.issue(server)
        with (
            running(
                "weft.services.router", "--repository", str(tmp_path), f"--target=model={models}",
                f"--tls-cert={own.cert}", f"--tls-key={own.key}", f"--tls-client-ca={authority.ca}",
            ) as router,
            running_proxy(name, tmp_path, router.grpc, pki=tmp_path) as proxy,
            proxy.stub(*(() if answers else RETRIES)) as stub,  # several tries, of which none may pass
        ):  # fmt: skip
            if answers:
                wait_serving(proxy.grpc)
                assert stub.ModelInfer(request("echo"), timeout=WAIT_S).raw_output_contents == [b"\1\2\3"]
            else:
                with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                    stub.ModelInfer(request("echo"), timeout=WAIT_S, wait_for_ready=True)


@PROXIES
def test_a_router_serves_models_that_are_behind_the_proxy(name: str, tmp_path: Path) -> None:
    """The page's configuration with model services in place of routers."""
    (tmp_path / "graphs").mkdir()
    arguments = ("--repository", str(tmp_path / "graphs"))
    with running_echo_model("weft", tmp_path / "models") as model, running_proxy(name, tmp_path, model) as proxy:
        wait_serving(proxy.grpc)
        with (
            running("weft.services.router", *arguments, f"--target=model={proxy.grpc}") as router,
            grpc.insecure_channel(router.grpc) as channel,
        ):
            call = InferCall("echo", inputs={"INPUT0": encode(np.array([1, 2, 3], np.uint8))})
            answer = GRPCInferenceServiceStub(channel).ModelInfer(request_from_call(call), timeout=WAIT_S)
    assert answer.raw_output_contents == [b"\1\2\3"]


@pytest.mark.parametrize("retries", [[], RETRIES], ids=["plain", "retries"])
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL], ids=["graceful", "kill"])
async def test_one_of_two_routers_is_started_again_under_load(
    proxy: Proxy, routers: list[Service], stop: signal.Signals, retries: list[tuple[str, object]]
) -> None:
    """A graceful stop loses no call; a kill at most those in flight, and none of a client that repeats."""
    is_over = asyncio.Event()
    calls = asyncio.create_task(load(proxy.grpc, retries, is_over))
    await asyncio.sleep(3)  # calls before the stop, and after it
    await asyncio.to_thread(routers[1].restart, stop)
    await asyncio.sleep(3)
    is_over.set()
    outcomes = await calls
    num_sent, num_lost = outcomes.total(), outcomes.total() - outcomes["OK"]
    print(f"{proxy.name} {stop.name} {'retries' if retries else 'plain'}: {num_sent} sent, {num_lost} lost")
    assert num_sent > 20 * NUM_WORKERS
    assert num_lost <= (NUM_WORKERS if stop is signal.SIGKILL and not retries else 0), outcomes
