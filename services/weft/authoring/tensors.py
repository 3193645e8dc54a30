"""Types of tensors in signatures: ``PIXELS: Tensor[FP32, 1, 8, 8]``, ``-> Outputs(LABEL=Tensor[INT64, 1])``."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from weft.authoring.faults import Place, fault
from weft.base.signature import TensorSpec, datatype_name
from weft_protos.model_config_pb2 import DataType

if TYPE_CHECKING:
    # For type checkers a tensor is an array or a symbol, whatever its datatype and dims are.
    from typing import Annotated as Tensor

    BOOL: TypeAlias = Any
    UINT8: TypeAlias = Any
    UINT16: TypeAlias = Any
    UINT32: TypeAlias = Any
    UINT64: TypeAlias = Any
    INT8: TypeAlias = Any
    INT16: TypeAlias = Any
    INT32: TypeAlias = Any
    INT64: TypeAlias = Any
    FP16: TypeAlias = Any
    FP32: TypeAlias = Any
    FP64: TypeAlias = Any
    BF16: TypeAlias = Any
    STRING: TypeAlias = Any
    DATATYPES: Mapping[str, Any]
else:
    #: Name in Python -> V2 datatype. STRING is TYPE_STRING in files and BYTES on the wire: any bytes, not only text.
    DATATYPES = {name.removeprefix("TYPE_"): datatype_name(number) for name, number in DataType.items() if number}
    globals().update(DATATYPES)


@dataclass(frozen=True)
class TensorType:
    """Datatype and shape of one tensor, as ``Tensor[FP32, 10]`` makes it.

    Attributes:
        datatype: V2 datatype: "FP32", "BYTES".
        dims: Shape without the batch dimension; -1 is any size.
        fields: Further fields of ``inference.ModelInput`` or of ``Output``, as ``options`` takes them.
    """

    datatype: str
    dims: tuple[int, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def options(self, **fields: Any) -> "TensorType":
        """The same type with further fields: ``optional=True``, ``reshape=[8, 8]``, ``label_filename="labels.txt"``."""
        return replace(self, fields={**self.fields, **fields})

    @property
    def is_optional(self) -> bool:
        """Whether requests, or answers, may lack the tensor."""
        return bool(self.fields.get("optional"))

    def declared(self, name: str) -> dict[str, Any]:
        """Fields of the ``ModelInput`` or ``Output`` that declares the tensor."""
        data_type = "TYPE_STRING" if self.datatype == "BYTES" else f"TYPE_{self.datatype}"
        return {"name": name, "data_type": data_type, "dims": self.dims, **self.fields}

    def spec(self, name: str) -> TensorSpec:
        """The tensor under a name."""
        return TensorSpec(name, self.datatype, self.dims, self.is_optional)


class _TensorTypes:
    """``Tensor[FP32, 1, 8, 8]``: a datatype and the shape without the batch dimension; -1 is any size."""

    def __getitem__(self, words: Any) -> TensorType:
        datatype, *dims = words if isinstance(words, tuple) else (words,)
        if datatype not in DATATYPES.values():
            known = ", ".join(f"weft.{name}" for name in DATATYPES)
            raise fault("G025", f"{datatype!r} is no datatype; Tensor[DATATYPE, DIM, ...] takes one of {known}")
        for dim in dims:
            if isinstance(dim, bool) or not isinstance(dim, int) or dim < -1:
                raise fault(
                    "G025", f"{dim!r} is no dimension of a tensor; give a whole number of 0 or more, or -1 for any size"
                )
        return TensorType(datatype, tuple(dims))


if not TYPE_CHECKING:
    Tensor = _TensorTypes()


class Outputs(dict[str, TensorType]):
    """Names and types of what a function gives: ``-> Outputs(LABEL=Tensor[INT64, 1])``, in this order."""

    def __init__(self, **types: Any) -> None:
        super().__init__(types)
        for name, given in types.items():
            _check_type(f"output '{name}'", given)


def signature_of(function: Callable[..., Any]) -> tuple[dict[str, TensorType | None], Outputs | None]:
    """Inputs and outputs that a function's annotations declare.

    A parameter with the default None is an optional input. For type checkers, to which a call is no type, the return
    type may be ``Annotated[Any, Outputs(...)]``.

    Returns:
        Inputs by parameter, None for one without annotation; outputs, None where nothing is annotated.

    Raises:
        GraphError: An annotation is no ``Tensor[...]``, or that of the answer no ``Outputs(...)``; or a parameter is
            not one tensor. It names the function's line.
    """
    place = Place(function.__code__.co_filename, function.__code__.co_firstlineno)
    title = f"'{function.__name__}'"
    try:
        known = inspect.get_annotations(function, eval_str=True)
    except (NameError, SyntaxError, TypeError) as error:
        raise fault("G025", f"the annotations of {title} cannot be read: {error}", place) from None
    hints = {name: one for name, one in known.items() if one is not Any}
    inputs: dict[str, TensorType | None] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise fault("G025", f"{title} takes '*{name}'; name every input: each parameter is one tensor", place)
        if parameter.default not in (None, parameter.empty):
            cure = "None makes it optional, and a step takes a constant: m.NAME(K=5)"
            raise fault("G025", f"input '{name}' of {title} has the default {parameter.default!r}; {cure}", place)
        given = hints.get(name)
        if given is not None:
            _check_type(f"input '{name}' of {title}", given, place)
            given = given.options(optional=True) if parameter.default is None else given
        inputs[name] = given
    outputs = hints.get("return")
    outputs = next((one for one in getattr(outputs, "__metadata__", ()) if isinstance(one, Outputs)), outputs)
    if outputs is not None and not isinstance(outputs, Outputs):
        raise fault("G025", f"{title} gives {outputs!r}; write -> weft.Outputs(NAME=Tensor[...], ...)", place)
    return inputs, outputs


def _check_type(what: str, given: Any, place: Place | None = None) -> None:
    if not isinstance(given, TensorType):
        raise fault(
            "G025", f"the type of {what} is {given!r}; write Tensor[DATATYPE, DIM, ...], as Tensor[FP32, 10]", place
        )
