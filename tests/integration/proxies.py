"""The proxies of docs/proxies.md, with its configurations, before routers and a gateway."""

import asyncio
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import pytest
from tests.integration.talking import TALKERS, TalkerCore
from tests.messages import request_from_call
from tests.ports import free_port
from tests.processes import WAIT_S

from weft.base.core import CallContext, IndexEntry, InferCall, InferResult
from weft.base.errors import ResourceExhaustedError, UnavailableError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import encode
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

PAGE = Path(__file__).parents[2] / "docs" / "proxies.md"
#: By language: whole configurations first, then what mTLS replaces or adds.
BLOCKS = {
    language: re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for language in ("json", "yaml", "nginx", "haproxy")
}
RETRIES = [("grpc.service_config", BLOCKS["json"][0])]
#: Messages of any size; a connection that was lost is tried again soon.
CHANNEL = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1),
           ("grpc.max_reconnect_backoff_ms", 200)]  # fmt: skip
LANGUAGES = {"envoy": "yaml", "nginx": "nginx", "haproxy": "haproxy"}
NUM_WORKERS = 4
_MODELS = ("echo", "hang", "busy")


class ProxiedCore(TalkerCore):
    """Beside the talkers: ``echo`` gives X after 30 ms, ``hang`` never answers, ``busy`` refuses two of three calls."""

    def signature(self, name: str, version: str) -> ModelSignature:
        if name not in _MODELS:
            return super().signature(name, version)
        x, y = (TensorSpec(tensor, "UINT8", (-1,)) for tensor in "XY")
        return ModelSignature(name, "1", "proxied", 0, (x,), (y,))

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry(name, "1", "READY", "") for name in (*TALKERS, *_MODELS)]

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        self._tell(1, call, context)
        try:
            if call.model_name == "hang":
                await asyncio.Event().wait()
            await asyncio.sleep(0.03)
        finally:
            self._tell(-1)
        num_busy = sum(known.model_name == "busy" for known in self.calls)
        if call.model_name == "busy" and num_busy % 3:
            raise UnavailableError("busy") if num_busy % 3 == 1 else ResourceExhaustedError("full", retry_after_ms=50)
        return InferResult(call.model_name, "1", call.request_id, {}, {"Y": call.inputs["X"]})

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        if call.model_name in _MODELS:
            yield await self.infer(call, context)
            return
        async for result in super().stream_infer(call, context):
            yield result


class Proxy(NamedTuple):
    """A running proxy."""

    name: str
    grpc: str
    http: str

    @contextmanager
    def stub(self, *options: tuple[str, object]) -> Iterator[GRPCInferenceServiceStub]:
        """For calls through it."""
        with grpc.insecure_channel(self.grpc, [*CHANNEL, *options]) as channel:
            yield GRPCInferenceServiceStub(channel)


def configuration(name: str, ports: Mapping[str, int], backends: Sequence[str], *, pki: Path | None = None) -> str:
    """The page's configuration of a proxy, with other addresses.

    Args:
        ports: To listen on, by those of the page.
        backends: In place of 10.0.0.1, 10.0.0.2 and 10.0.0.3; the last again for those that are not given.
        pki: The proxy calls over TLS, with the files of this folder in place of /etc/weft.
    """
    text, secured = BLOCKS[LANGUAGES[name]]
    if pki is not None:
        place = {"envoy": r"\Z", "nginx": r"^ *grpc_pass .*\n", "haproxy": r"^ *default-server .*\n"}[name]
        text, num_places = re.subn(place, secured.replace("/etc/weft", str(pki)), text, flags=re.MULTILINE)
        assert num_places == 1
    text = re.sub(r"(0\.0\.0\.0)(:|, port_value: )(\d+)", lambda found: f"127.0.0.1{found[2]}{ports[found[3]]}", text)

    def backend(found: re.Match[str]) -> str:
        host, _, port = backends[min(int(found[1]), len(backends)) - 1].partition(":")
        return f"{host}{found[2]}{port}"

    return re.sub(r"10\.0\.0\.(\d)(:|, port_value: )\d+", backend, text)


@contextmanager
def running_proxy(name: str, folder: Path, *backends: str, pki: Path | None = None) -> Iterator[Proxy]:
    """A proxy with the page's configuration, which listens; skips the test where it is not installed."""
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if program is None:
        pytest.skip(f"{name} is not installed")
    ports = {"9001": free_port(), "9000": free_port()}
    text = configuration(name, ports, backends, pki=pki)
    if name == "nginx":  # its folders are root's
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        text = text.replace("http {", "http {" + "".join(f" {kind}_temp_path {folder}/{kind};" for kind in kinds), 1)
    file = folder / f"{name}.{'yaml' if name == 'envoy' else 'conf'}"
    file.write_text(text)
    command = {
        "envoy": ["-c", file, "--disable-hot-restart", "--concurrency", "1", "--log-level", "error"],
        "nginx": ["-p", folder, "-c", file, "-e", "stderr", "-g", f"daemon off; pid {folder}/nginx.pid;"],
        "haproxy": ["-db", "-f", file],
    }[name]
    with (
        (folder / f"{name}.log").open("wb") as log,
        subprocess.Popen([program, *map(str, command)], stdout=log, stderr=log) as process,
    ):
        try:
            yield Proxy(name, *(f"127.0.0.1:{port}" for port in ports.values()))
            assert process.poll() is None, (folder / f"{name}.log").read_text()
        finally:
            process.terminate()
            process.wait(WAIT_S)


def request(model: str, data: np.ndarray | None = None) -> pb.ModelInferRequest:
    """One with X as given, else of three bytes."""
    x = np.array([1, 2, 3], np.uint8) if data is None else data
    return request_from_call(InferCall(model, inputs={"X": encode(x)}))


async def load(address: str, options: Sequence[tuple[str, object]], is_over: asyncio.Event) -> Counter[str]:
    """What became of calls of ``echo``: ``NUM_WORKERS`` at once, about 100 a second, until it is over."""
    outcomes: Counter[str] = Counter()

    async def work(stub: GRPCInferenceServiceStub) -> None:
        while not is_over.is_set():
            try:
                answer = await stub.ModelInfer(request("echo"), timeout=WAIT_S)
                outcomes["OK" if answer.raw_output_contents == [b"\1\2\3"] else "WRONG"] += 1
            except grpc.aio.AioRpcError as error:
                outcomes[f"{error.code().name}: {error.details()}"] += 1
            await asyncio.sleep(0.01)

    async with grpc.aio.insecure_channel(address, [*CHANNEL, *options]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        await asyncio.gather(*(work(stub) for _ in range(NUM_WORKERS)))
    return outcomes
