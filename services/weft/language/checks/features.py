"""What a file asks for and Weft does not do: an error at its place, so that nothing is silently ignored."""

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from weft.base.text.pbtxt import is_map
from weft.language.checks.fields import check_fields
from weft.language.checks.limits import check_limits
from weft.language.syntax.file import GraphFile, GraphReport

_TENSOR = "inside a graph tensors are passed on as they are; only the graph's own inputs and outputs may have it"
_STATIC = "tensors are plain arrays here, never a model's shape values or a vendor's layout"
#: Message: its field, and what to do instead.
_UNSUPPORTED = {
    "Step": {"model_namespace": "leave it out, model names are unique in a router"},
    "ModelInput": {
        "reshape": _TENSOR,
        "is_shape_tensor": _STATIC,
        "is_non_linear_format_io": _STATIC,
    },
    "Output": {"reshape": _TENSOR, "is_shape_tensor": _STATIC, "is_non_linear_format_io": _STATIC},
}
#: Triton Inference Server's own words for fields that only a model has.
_MODEL_ONLY = {
    "instance_group": "instance group should not be specified",
    "optimization": "optimization should not be specified",
    "model_warmup": "model_warmup can not be specified",
    "backend": "backend should not be specified",
    "default_model_filename": "default_model_filename should not be specified",
}


def check_features(file: GraphFile, report: GraphReport) -> None:
    """Report fields without effect (G018), values out of range (G025), and what is not for graphs (G024, G026)."""
    _walk(file, file.message, "", report)
    for name, text in _MODEL_ONLY.items():
        if any(field.name == name for field, _ in file.message.ListFields()):
            report.error("G026", file, name, f"{text} for {file.title}; it belongs to a model", is_name=True)
    for i, output in enumerate(file.message.output):
        if output.label_filename:
            path = f"output[{i}].label_filename"
            report.warning("G024", file, path, "'label_filename' is not read: classes are told by index")
    check_fields(file, report)
    check_limits(file, report)


def _walk(file: GraphFile, message: Message, prefix: str, report: GraphReport) -> None:
    """Report fields of ``_UNSUPPORTED`` wherever they stand."""
    unsupported = _UNSUPPORTED.get(message.DESCRIPTOR.name, {})
    for field, value in message.ListFields():
        path = prefix + field.name
        if field.name == "reshape" and prefix.startswith(("input", "output")):
            continue
        if field.name == "allow_ragged_batch":
            text = "'allow_ragged_batch' changes nothing here: requests are batched by the servers of the models"
            report.warning("G018", file, path, text)
        elif field.name in unsupported:
            text = f"'{field.name}' is not supported by this version of Weft; {unsupported[field.name]}"
            report.error("G024", file, path, text, is_name=True)
        elif field.type == FieldDescriptor.TYPE_MESSAGE and not is_map(field):
            items = (
                [(f"{path}[{i}].", item) for i, item in enumerate(value)]
                if field.is_repeated
                else [(f"{path}.", value)]
            )
            for inner, item in items:
                _walk(file, item, inner, report)
