"""Authentication of all calls, in one interceptor."""

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.base.errors import WeftError
from weft.base.security.access import CALLER, KeyRing, Principal, keys_in
from weft.v2.server.call_boundary import CallBoundary, Context
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
    "/weft.graph.GraphService/TargetSignatures": "control",
    "/weft.graph.GraphService/GraphFeedback": "feedback",
}

Handler = Any  # grpc.RpcMethodHandler, of which the stubs know no members


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic at run time
    """Admits calls with a valid key, and all calls of ``OPEN_METHODS``. Reflection requires a key too.

    Args:
        keys: Valid keys.
        service: Name for log lines.
    """

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
        kind = f"{_word(handler.request_streaming)}_{_word(handler.response_streaming)}"
        behave = getattr(handler, kind)

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

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        answering = answer_many if inspect.isasyncgenfunction(behave) else answer
        made: Handler = make(answering, handler.request_deserializer, handler.response_serializer)
        return made


def certificate_names(context: Context) -> list[str]:
    """Common and alternative names in the client's certificate, which gRPC has verified."""
    shown = context.auth_context()
    return [
        name.decode(errors="replace")
        for kind in ("x509_common_name", "x509_subject_alternative_name")
        for name in shown.get(kind, ())
    ]


class RefusalCollector(Collector):
    """Metric of rejected calls, by principal and reason.

    Args:
        keys: Counts them.
    """

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


def _word(is_streaming: bool) -> str:
    return "stream" if is_streaming else "unary"
