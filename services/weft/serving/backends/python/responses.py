"""Responses of a model, and their senders."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence

from weft.base.core import ParameterValue
from weft.base.errors import InternalError, WeftError
from weft.base.tensors import Array
from weft.serving.backends.python.errors import TritonError, TritonModelException
from weft.serving.backends.python.tensors import Tensor

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class InferenceResponse:
    """The answer to one request.

    Args:
        output_tensors: Outputs in any order; ignored if there is an error.
        error: Fails the request.
        parameters: Response parameters: bool, int, float or str by name.

    Raises:
        TritonModelException: A parameter is none of these.
    """

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> None:
        self._output_tensors, self._error, self._parameters = list(output_tensors), error, dict(parameters or {})
        if self._parameters:
            check_parameters(self._parameters, "response")

    def output_tensors(self) -> list[Tensor]:
        """Outputs as given."""
        return self._output_tensors

    def has_error(self) -> bool:
        """Whether the request fails."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, if any."""
        return self._error

    def contents(self) -> tuple[dict[str, Array], dict[str, ParameterValue]]:
        """Outputs and parameters as the server sends them; not for models."""
        outputs = {tensor.name(): tensor.as_numpy() for tensor in self.output_tensors()}
        return outputs, json.loads(self.parameters()) if self._parameters else {}

    def parameters(self) -> str:
        """Response parameters as a JSON object."""
        return json.dumps(self._parameters)


def check_parameters(parameters: Mapping[str, object], what: str) -> None:
    """Raise TritonModelException for a parameter of ``what`` that the protocol cannot carry."""
    for key, value in parameters.items():
        is_whole = isinstance(value, int) and -(2**63) <= value < 2**64
        if not isinstance(key, str) or not (is_whole or isinstance(value, float | str)):
            raise TritonModelException(
                f"{what} parameters must be bool, 64-bit int, float or str by name, got {key!r}: {value!r}"
            )


class OutputStream:
    """The output stream of one request, shared by the request and its senders.

    When the model has dropped them all without a last response, the request fails: nothing can answer it any more.
    ``send`` takes a response, or None, and whether it is the last; ``fail`` takes the error of a request that the model
    will not answer, on any thread, and never waits.
    """

    def __init__(
        self, send: Callable[[InferenceResponse | None, bool], None], fail: Callable[[WeftError], None]
    ) -> None:
        self._send = send
        self._fail = fail
        self.is_closed = False

    def send(self, response: InferenceResponse | None, is_final: bool) -> None:
        """Send a response; waits while too many are unread.

        Raises TritonModelException if the last one was sent before.
        """
        if self.is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        self._send(response, is_final)
        self.is_closed = is_final

    def fail(self, error: WeftError) -> None:
        """Fail the request, unless its last response was sent."""
        if not self.is_closed:
            self.is_closed = True
            self._fail(error)

    def __del__(self) -> None:
        if not self.is_closed:
            self._fail(InternalError("the model dropped the request without a last response"))


class Reply:
    """The response to a request of a model that is not decoupled, sent instead of returned."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._response: InferenceResponse | None = None
        self._error: WeftError | None = None

    def outlet(self) -> OutputStream:
        """Takes the response."""
        return OutputStream(self._take, self._fail)

    @property
    def has_ended(self) -> bool:
        """Whether ``wait`` returns at once."""
        return self._ended.is_set()

    @property
    def answer(self) -> InferenceResponse | None:
        """The response, once it was sent as the last: nothing that the model does later takes it back."""
        return self._response if self._ended.is_set() and self._error is None else None

    def wait(self) -> InferenceResponse:
        """Wait for the response. Raises a WeftError where there is none."""
        self._ended.wait()
        if self._response is None:
            raise self._error or InternalError("the model sent no response")
        return self._response

    def _take(self, response: InferenceResponse | None, is_final: bool) -> None:
        if response is not None:
            if self._response is not None:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            self._response = response
        elif self._response is None:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
            )
        if is_final:
            self._ended.set()

    def _fail(self, error: WeftError) -> None:
        self._error = error
        self._ended.set()


class InferenceResponseSender:
    """Sends the responses to one request, also after ``execute`` has returned; may be used from any thread."""

    def __init__(self, outlet: OutputStream, is_cancelled: Callable[[], bool]) -> None:
        self._outlet = outlet
        self._is_cancelled = is_cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response to the client.

        The call waits while 16 responses, or 16 MiB of them, have not been read by the client. When the client has
        left, it returns at once and drops the response. Others may follow a response with an error.

        Args:
            response: May be left out with ``TRITONSERVER_RESPONSE_COMPLETE_FINAL``.
            flags: 0, or ``TRITONSERVER_RESPONSE_COMPLETE_FINAL`` with or after the last response.

        Raises:
            TritonModelException: The last response was sent before, or an argument is wrong.
        """
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(
                f"Unable to send response. Unsupported flag provided: {flags}; use 0 or "
                "TRITONSERVER_RESPONSE_COMPLETE_FINAL"
            )
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TritonModelException(f"send takes an InferenceResponse, got {type(response).__name__}")
        self._outlet.send(response, bool(flags))

    def is_cancelled(self) -> bool:
        """Whether the client has left, or the deadline has passed."""
        return self._is_cancelled()
