"""Limits of one request, checked before memory is allocated for it.

The message size bounds most things; these bound what a small message could expand to: an empty string takes 4 bytes on
the wire and more than 40 in memory. They are fixed and a retry cannot help, so exceeding one is INVALID_ARGUMENT:
RESOURCE_EXHAUSTED would be retried and taken for overload.
"""

from weft.base.core import InferCall, Parameters
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import num_elements

#: Inputs of a request, and requested outputs.
MAX_TENSORS = 1024
#: Dimensions of a tensor, the limit of numpy.
MAX_DIMS = 64
#: Elements of a BYTES tensor.
MAX_STRINGS = 1 << 22
#: Elements that lie in ``contents`` of the message, where protobuf makes an object of each before anything is checked.
MAX_TYPED_STRINGS = 1 << 20
#: Parameters of a request, or of one tensor.
MAX_PARAMETERS = 256
#: Characters of the names and strings of all parameters of a request, or of one tensor.
MAX_PARAMETER_CHARS = 1 << 20
#: Characters of a name or an id.
MAX_NAME_CHARS = 1024


def share(limit: int, num_workers: int) -> int:
    """The part of a limit for one of several workers, rounded up; 0, no limit, stays 0."""
    return -(-limit // num_workers)


def divided(num_workers: int) -> str:
    """Suffix for messages about a limit that ``share`` has divided."""
    return f", divided among {num_workers} workers," if num_workers > 1 else ""


def check_count(what: str, count: int, limit: int, unit: str) -> None:
    """Check ``count`` against ``limit``. Raises InvalidArgumentError with both numbers."""
    if count > limit:
        raise InvalidArgumentError(f"{what} has {count} {unit}; at most {limit} are allowed")


def check_call(call: InferCall) -> None:
    """Check names, shapes and requested outputs of a call; parameters are checked by ``check_parameters``.

    Raises:
        InvalidArgumentError: A limit is exceeded; the message has both numbers. Or a name has unprintable characters.
    """
    if len(call.model_name) > MAX_NAME_CHARS or not call.model_name.isprintable():
        raise _name_error("the model's name", call.model_name)
    if len(call.model_version) > MAX_NAME_CHARS:
        check_count("the model's version", len(call.model_version), MAX_NAME_CHARS, "characters")
    if len(call.request_id) > MAX_NAME_CHARS:
        check_count("the request id", len(call.request_id), MAX_NAME_CHARS, "characters")
    for name, (datatype, shape, _) in call.inputs.items():
        if len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise _name_error("the name of an input", name)
        if len(shape) > MAX_DIMS:
            check_count(f"the shape of input '{name}'", len(shape), MAX_DIMS, "dimensions")
        if datatype == "BYTES":
            check_count(f"input '{name}'", num_elements(shape), MAX_STRINGS, "strings")
    for output in call.outputs:
        if len(output.name) > MAX_NAME_CHARS or not output.name.isprintable():
            raise _name_error("the name of a requested output", output.name)


def check_parameters(what: str, parameters: Parameters) -> None:
    """Check names and sizes of parameters. Raises like ``check_call``."""
    num_chars = 0
    for key, value in parameters.items():
        if len(key) > MAX_NAME_CHARS or not key.isprintable():
            raise _name_error(f"the name of a parameter of {what}", key)
        num_chars += len(key)
        if isinstance(value, str):
            num_chars += len(value)
    check_count(f"the parameters of {what}", num_chars, MAX_PARAMETER_CHARS, "characters")


def check_name(what: str, name: str) -> None:
    """Check that a name is short and can be shown. Raises InvalidArgumentError."""
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise _name_error(what, name)


def _name_error(what: str, name: str) -> InvalidArgumentError:
    """Error message for a name that is too long or not printable."""
    if len(name) > MAX_NAME_CHARS:
        return InvalidArgumentError(f"{what} has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed")
    return InvalidArgumentError(f"{what} has characters that cannot be shown: {name[:80]!a}; leave them out")
