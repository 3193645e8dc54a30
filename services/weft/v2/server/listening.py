"""Opens the ports of a service, with TLS and authentication as configured; warns if exposed without them."""

import argparse
import contextlib
import inspect
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, Self

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from weft.base.errors import UnavailableError, WeftError
from weft.base.observing.logs import get_logger
from weft.base.security.access import CALLER, KeyRing, Principal, keys_in
from weft.base.statistics import ModelStatistics
from weft.v2.security.channel import is_local
from weft.v2.security.tls import ServerTls, server_tls_files
from weft.v2.server.call_boundary import CallBoundary, Context
from weft.v2.server.make_server import add_tls_port, handler_like, kind_of, make_server, server_options_of
from weft.v2.server.metrics import CertificateCollector, DroppedLogsCollector, make_registry, serve_metrics
from weft.v2.server.unix_socket import LocalTensorService, UnixSocket
from weft.wire.interface import grpc

_INFERENCE = "/inference.GRPCInferenceService/"

#: Methods for probes, which have no key.
OPEN_METHODS = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        f"{_INFERENCE}ServerLive",
        f"{_INFERENCE}ServerReady",
    }
)

_CONTROLLING = (
    "TargetSignatures", "GraphSource", "GraphPicture", "Observe", "Rollout", "SetWeights", "Recording",
)  # fmt: skip
#: Methods that require a right in addition to a valid key, by the field of the keys file.
RIGHT_BY_METHOD = {
    f"{_INFERENCE}{name}": "control"
    for name in (
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
    )
} | {
    **{f"/weft.graph.GraphService/{name}": "control" for name in _CONTROLLING},
    "/weft.graph.GraphService/GraphFeedback": "feedback",
}

Handler = Any  # grpc.RpcMethodHandler, of which the stubs know no members


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic at run time
    """Admits calls with a valid key, and all calls to ``OPEN_METHODS``. Reflection needs a key too."""

    def __init__(self, keys: KeyRing, service: str) -> None:
        self._keys = keys
        self._edge = CallBoundary(service)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        """The handler of the method, which then runs as the principal; or one that rejects the call."""
        method = details.method
        handler = await continuation(details)
        if method in OPEN_METHODS or handler is None:
            return handler
        metadata = details.invocation_metadata or ()
        if self._keys.takes_certificates and not keys_in(metadata):
            return self._by_certificate(handler, method)
        try:
            self._admit(self._keys.identify(metadata), method)
        except WeftError as error:
            return self._refusing(error)
        return handler

    def _admit(self, caller: Principal, method: str) -> None:
        if right := RIGHT_BY_METHOD.get(method):
            caller.check_right(right, method.rpartition("/")[2])
        CALLER.set(caller)  # of the task that runs this call, and no other

    def _refusing(self, error: WeftError) -> Handler:
        """A handler that rejects the call; a streaming one, so that gRPC does not read the request message first."""

        async def refuse(requests: Any, context: Context) -> None:
            self._edge.fail(context, error)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _by_certificate(self, handler: Handler, method: str) -> Handler:
        """The handler as the principal of the client's certificate, which only the context of the call reveals."""
        behave = getattr(handler, kind_of(handler))

        def is_admitted(context: Context) -> bool:
            try:
                self._admit(self._keys.identify_certificate(certificate_names(context)), method)
            except WeftError as error:
                self._edge.fail(context, error)
                return False
            return True

        async def answer(request: Any, context: Context) -> Any:
            return await behave(request, context) if is_admitted(context) else None

        async def answer_many(request: Any, context: Context) -> AsyncIterator[Any]:
            if is_admitted(context):
                async with contextlib.aclosing(behave(request, context)) as responses:
                    async for response in responses:
                        yield response

        return handler_like(handler, answer_many if inspect.isasyncgenfunction(behave) else answer)


def certificate_names(context: Context) -> list[str]:
    """Common and alternative names in the client's certificate, which gRPC has verified."""
    shown = context.auth_context()
    return [
        name.decode(errors="replace")
        for kind in ("x509_common_name", "x509_subject_alternative_name")
        for name in shown.get(kind, ())
    ]


class RefusalCollector(Collector):
    """Metric of rejected calls, by principal and reason."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        """One family."""
        family = CounterMetricFamily(
            "weft_access_refused", "Calls refused for their key or its limits", labels=("client", "reason")
        )
        for labels, count in list(self._keys.refusals.items()):
            family.add_metric(labels, count)
        yield family


_log = get_logger("weft.server")


class Ports(NamedTuple):
    """Addresses of a service, ``host:port``."""

    grpc: str
    metrics: str


class WorkerPlace(NamedTuple):
    """A worker's index in its group, from 1, and its sockets; numbers joined by slashes on the command line.

    Attributes:
        descriptor: Of the socket to the parent.
        listens_late: Siblings already serve, so it listens once it is ready.
        unix_descriptor: Of a Unix socket that all of them serve; -1: there is none.
    """

    index: int  # type: ignore[assignment]  # in place of the method of tuples
    num_workers: int
    descriptor: int
    listens_late: int = False
    unix_descriptor: int = -1

    def __str__(self) -> str:
        return "/".join(str(int(number)) for number in self)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the command-line form. Raises ValueError."""
        return cls._make(map(int, text.split("/")))


class Worker(Protocol):
    """This process as one of several that serve the same port."""

    place: WorkerPlace

    def publish(self, registry: CollectorRegistry) -> None:
        """Publish this process's metrics through the parent, since it has no metrics port."""


class Listener:
    """Creates the server of a service and opens its ports."""

    def __init__(self, service: str, options: argparse.Namespace, worker: Worker | None = None) -> None:
        self._options = options
        self._worker = worker
        num_workers = 1 if worker is None else worker.place.num_workers
        files = server_tls_files(options)
        self._tls = None if files is None else ServerTls(files)
        self._keys = KeyRing(options.auth_keys, num_workers=num_workers) if options.auth_keys else None
        interceptors = () if self._keys is None else (AccessInterceptor(self._keys, service),)
        self.server = make_server(server_options_of(options), interceptors, wire=options.wire)
        if worker is not None and worker.place.unix_descriptor >= 0:
            own: Any = self.server  # grpcio's takes no socket that listens already, and the parent opens none for it
            own.add_socket(socket.socket(fileno=worker.place.unix_descriptor))
        path = options.unix_socket
        self._unix_socket = None if path is None else UnixSocket(path, takes_over=options.take_over)
        self.local_tensors: LocalTensorService | None = None
        if path is not None:
            self.local_tensors = LocalTensorService(
                path, takes_over=options.take_over, max_message_bytes=options.max_message_bytes
            )

    def listen(self, statistics: Callable[[], Iterable[ModelStatistics]], collectors: Sequence[Collector]) -> Ports:
        """Open both ports; gRPC responds once the server is started. Raises UnavailableError if one is taken."""
        options = self._options
        for warning in exposure(
            options.host,
            is_encrypted=self._tls is not None,
            asks_for_certificates=self._tls is not None and self._tls.requires_client_certificate,
            asks_for_keys=self._keys is not None,
        ):
            _log.warning("%s", warning)
        if self._keys is not None:
            collectors = (*collectors, RefusalCollector(self._keys))
        option, port = "--grpc-port", options.grpc_port
        try:
            address = host_and_port(options.host, port)
            if self._tls is None:
                grpc_port = self.server.add_insecure_port(address)
            else:
                grpc_port = add_tls_port(self.server, address, self._tls)
            option, port = "--metrics-port", options.metrics_port
            registry = make_registry(statistics, (*collectors, DroppedLogsCollector(), CertificateCollector(options)))
            if self._worker is None:
                shares_port = options.share_ports or options.take_over
                metrics_port = serve_metrics(registry, options.host, port, self._tls, shares_port=shares_port)
            else:
                self._worker.publish(registry)
                metrics_port = 0
        except (RuntimeError, OSError) as error:
            reason = str(error).partition(";")[0]  # gRPC goes on with advice on its own logs
            address = host_and_port(options.host, port)
            raise UnavailableError(f"cannot listen on {address}: {reason}; choose another {option}") from error
        if self._unix_socket is not None:
            self._unix_socket.add_to(self.server)
        if self.local_tensors is not None:
            self.local_tensors.start()
        return Ports(host_and_port(options.host, grpc_port), host_and_port(options.host, metrics_port))

    def close(self) -> None:
        """Remove the Unix socket after the server has stopped."""
        if self._unix_socket is not None:
            self._unix_socket.remove()
        if self.local_tensors is not None:
            self.local_tensors.close()


def exposure(host: str, *, is_encrypted: bool, asks_for_certificates: bool, asks_for_keys: bool) -> list[str]:
    """Security warnings for ports on ``host`` that other machines can reach."""
    if is_local(host):
        return []
    warnings = []
    if not is_encrypted:
        warnings.append(
            f"plaintext ports listen on {host}, which other machines can reach: requests, answers and keys can be read "
            "and changed on the way; give --tls-cert and --tls-key"
        )
    if not (asks_for_keys or asks_for_certificates):
        warnings.append(
            f"ports without authentication listen on {host}, which other machines can reach: whoever reaches them may "
            "call; give --auth-keys or --tls-client-ca"
        )
    if not asks_for_certificates:
        warnings.append(
            f"the metrics port on {host} asks for no certificate, and never for a key: who reaches it reads the names "
            "of models and clients, and figures"
        )
    return warnings


def host_and_port(host: str, port: int) -> str:
    """``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
