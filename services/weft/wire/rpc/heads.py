"""What the fields of a request and of a response say about a call."""

from typing import Any

from weft.wire.interface import StatusCode
from weft.wire.rpc.messages import ACCEPTED, ENCODINGS
from weft.wire.rpc.metadata import Metadata, decode_metadata, decode_timeout
from weft.wire.rpc.status import STATUS_BY_NUMBER, decode_message, status_of_http

Fields = tuple[tuple[str, str], ...]

_VALUE_COST_BYTES = 64

CONTENT_TYPE = "application/grpc"


def is_grpc(content_type: str) -> bool:
    """Whether a content type is that of gRPC, with any format of messages."""
    return content_type == CONTENT_TYPE or content_type.startswith(("application/grpc+", "application/grpc;"))


class RequestHead:
    """The fields of a request; made once for a block that is repeated.

    Attributes:
        path: Full name of the method, with a leading slash.
        http_status: Answer for something that is no call of gRPC; 200: it is one.
        failure: Status and message for a call that cannot begin; None: it can.
        timeout_s: From the start of the call; None: no deadline.
        encoding: Compression of messages of the request.
        accepted: Encodings that the client reads.
        metadata: For the handler.
        metadata_bytes: What the metadata hold in memory, about.
        resolved: What a server keeps with the head, such as the handler of the method.
    """

    __slots__ = (
        "accepted", "encoding", "failure", "http_status", "metadata", "metadata_bytes", "path", "resolved", "timeout_s",
    )  # fmt: skip

    def __init__(self, fields: Fields, *, is_too_large: bool = False) -> None:
        values = dict(fields)
        self.path = values.get(":path", "")
        self.timeout_s: float | None = None
        self.encoding = values.get("grpc-encoding", "identity")
        self.accepted = values.get("grpc-accept-encoding", "")
        self.metadata: Metadata = ()
        self.metadata_bytes = 0
        self.resolved: Any = None
        self.http_status = 200
        self.failure: tuple[StatusCode, str] | None = None
        if values.get(":method") != "POST":
            self.http_status = 405
        elif not is_grpc(values.get("content-type", "")):
            self.http_status = 415
        elif is_too_large:
            self.failure = StatusCode.RESOURCE_EXHAUSTED, "the metadata of the call is larger than this server takes"
        else:
            self._read_call(fields, values)

    def _read_call(self, fields: Fields, values: dict[str, str]) -> None:
        timeout = values.get("grpc-timeout")
        if timeout is not None:
            self.timeout_s = decode_timeout(timeout)
            if self.timeout_s is None:
                self.failure = StatusCode.INTERNAL, f"grpc-timeout '{timeout}' is no number with a unit"
        if self.encoding not in ENCODINGS:
            text = f"grpc-encoding '{self.encoding}' is not supported; this server reads {ACCEPTED}"
            self.failure = StatusCode.UNIMPLEMENTED, text
        try:
            self.metadata = decode_metadata(fields)
        except ValueError as error:
            self.failure = StatusCode.INTERNAL, str(error)
        if self.metadata:
            num_values = len(self.metadata)
            self.metadata_bytes = _VALUE_COST_BYTES * num_values + sum([len(value) for _, value in self.metadata])


class ResponseHead:
    """The fields of a response, or its trailers; made once for a block that is repeated.

    Attributes:
        http_status: 0 in trailers.
        status: Status of the call; None: the block has none.
        message: With the status.
        encoding: Compression of messages of the response.
        metadata: Initial or trailing.
        fault: Why this is no answer of gRPC; "" if it is one.
    """

    __slots__ = ("encoding", "fault", "http_status", "message", "metadata", "status")

    def __init__(self, fields: Fields) -> None:
        values = dict(fields)
        self.http_status = int(values.get(":status", "0"))
        self.encoding = values.get("grpc-encoding", "identity")
        self.status: StatusCode | None = None
        self.message = decode_message(values.get("grpc-message", ""))
        self.metadata: Metadata = ()
        self.fault = ""
        number = values.get("grpc-status")
        if number is not None:
            is_number = number.isdecimal() and number.isascii() and len(number) < 6
            self.status = STATUS_BY_NUMBER.get(int(number), StatusCode.UNKNOWN) if is_number else StatusCode.UNKNOWN
            if not is_number:
                self.message = f"grpc-status '{number}' is no number"
        elif self.http_status and self.http_status != 200 and self.http_status >= 200:
            self.status = status_of_http(self.http_status)
            self.message = f"the server answered with HTTP status {self.http_status}"
        elif self.http_status == 200 and not is_grpc(values.get("content-type", "")):
            self.fault = f"the answer has content-type '{values.get('content-type', '')}', which is not gRPC's"
        try:
            self.metadata = decode_metadata(fields)
        except ValueError as error:
            self.fault = str(error)
