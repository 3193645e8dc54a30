"""``@model``: a function, or a class with state, as a folder that servers load: ``config.pbtxt`` and ``model.py``."""

import inspect
import json
from collections.abc import Mapping
from functools import cached_property, partial, update_wrapper
from pathlib import Path
from types import FunctionType
from typing import Any

from weft.authoring.faults import Place, fault, raise_at_place
from weft.authoring.fields import check_known, fill, known_fields
from weft.authoring.source import Source
from weft.authoring.steps import Draft, Target
from weft.authoring.tensors import TensorType, signature_of
from weft.authoring.tracing import current_scope
from weft.base.repository.layout import CONFIG_FILENAME, is_folder_name
from weft.base.signature import OPTIONAL_OUTPUTS_PARAMETER, ModelSignature
from weft.base.text.pbtxt_writer import text_of
from weft.language.syntax.file import GraphError
from weft.serving.backends.python import PythonBackend
from weft.serving.backends.python.runner import FILENAME
from weft.serving.config.placement import EXECUTION
from weft.tools.lock import StaticCatalog
from weft_protos.model_config_pb2 import ModelConfig, ModelDynamicBatching

#: Fields of a configuration that the function itself says.
_SAID = ("backend", "platform", "input", "output", "default_model_filename", "model_transaction_policy")


def Batching(delay_us: int = 0, **fields: Any) -> ModelDynamicBatching:  # noqa: N802  # it makes a message
    """Settings of a batcher: how long requests wait for others, in microseconds, and fields of ``dynamic_batching``."""
    message = ModelDynamicBatching()
    with _OnUsersLine():
        fill(message, {"max_queue_delay_microseconds": delay_us, **fields}, "", Draft())
    return message


class Model:
    """A model made of a function; called directly it is the function.

    Attributes:
        name: Of the model, and of its folder.
        config: Its configuration, as ``config.pbtxt`` has it.
        signature: Names, types and shapes of its tensors.
    """

    __wrapped__: Any

    def __init__(self, made_of: Any, fields: Mapping[str, Any]) -> None:
        call = vars(made_of).get("__call__") if isinstance(made_of, type) else made_of
        function = None if isinstance(call, staticmethod) else call and inspect.unwrap(call)
        if not isinstance(function, FunctionType) or not made_of.__name__.isidentifier():
            got = type(made_of).__name__
            raise fault("", f"@weft.model takes a function with a name, or a class with __call__, got {got}")
        update_wrapper(self, made_of, updated=())  # sets __wrapped__ too
        self._function = function
        self.name = str(fields.get("name", made_of.__name__))
        self._title, code = f"model '{self.name}'", function.__code__
        self._place = Place(code.co_filename, code.co_firstlineno)
        if not is_folder_name(self.name):
            raise fault("", f"model {self.name!r} needs a name that a folder can have, without '/'", self._place)
        inputs, outputs = signature_of(function)
        if isinstance(made_of, type):
            if not inputs:
                raise fault("", f"{self._title} needs self as the first parameter of __call__", self._place)
            inputs.pop(next(iter(inputs)))
        untyped = [name for name, given in inputs.items() if given is None]
        if untyped or not outputs or inspect.iscoroutinefunction(function):
            needs = f"a type for {untyped[0]}, as Tensor[FP32, 10]" if untyped else "-> weft.Outputs(NAME=Tensor[...])"
            raise fault("", f"{self._title} needs {needs}, and is no coroutine", self._place)
        self.config = _config_of(self.name, inputs, outputs, fields)
        if inspect.isgeneratorfunction(function):
            self.config.model_transaction_policy.decoupled = True
        self.signature = ModelSignature.from_config(self.config, "1")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, of a class that is made once; in a graph that is traced, a step."""
        if current_scope() is None:
            return self._called(*args, **kwargs)
        catalog = StaticCatalog()
        catalog.add(self.name, 1, "", self.signature)
        target = Target("model_name", self.name, catalog=catalog, owner=self).with_signature(self.signature)
        return target(*args, **kwargs)

    @cached_property
    def _called(self) -> Any:
        return self.__wrapped__() if isinstance(self.__wrapped__, type) else self.__wrapped__

    @cached_property
    def source(self) -> Source:
        """The function with what it needs. Raises GraphError for what cannot be carried over."""
        return Source(self.__wrapped__, self._function, self._title)

    @property
    def text(self) -> str:
        """The text of ``model.py``, which other servers that take such models can serve too."""
        execute = _EXECUTE_STREAM if self.config.model_transaction_policy.decoupled else _EXECUTE
        title = f'"""Model \'{self.name}\', written by Weft from {Path(self._place.file).name}: change it there."""\n\n'
        if taken := self.source.names.keys() & {"_json", "_np", "_pb", "_traceback", "TritonPythonModel", "_made_of"}:
            raise fault("", f"{self._title} uses the name {min(taken)}, which model.py has for itself", self._place)
        adapter = (_CLASS + execute).replace("FUNCTION", self.__wrapped__.__name__)
        return title + self.source.future + _IMPORTS + self.source.text + adapter

    def write(self, to: Path, version: int = 1) -> list[Path]:
        """Write the model's folder into a repository; returns its files. Raises GraphError or OSError."""
        folder = Path(to) / self.name / str(version)
        contents = {
            folder.parent / CONFIG_FILENAME: text_of(self.config).encode(),
            folder / FILENAME: self.text.encode(),
            **{folder / f"{name}.py": path.read_bytes() for name, path in self.source.siblings.items()},
        }
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in contents.items():
            path.write_bytes(content)
        return list(contents)


def model(made_of: Any = None, /, **fields: Any) -> Any:
    """Make a ``Model`` of a function of numpy arrays.

    Its annotations are the tensors::

        @weft.model(max_batch_size=64, batching=weft.Batching(delay_us=500))
        def top2(PROBS: Tensor[FP32, 10]) -> weft.Outputs(FIRST=Tensor[INT64, 2]):
            return {"FIRST": (-PROBS).argsort(axis=1)[:, :2]}

    It gets the rows of all requests of a batch, and returns a dict of arrays with as many. A generator gives any number
    of responses to one request: the model is decoupled. A class is made without arguments for each instance, and its
    ``__call__`` is the function.

    Args:
        fields: Fields of ``ModelConfig``; and ``batching``, its ``dynamic_batching``; ``instances``, their number or an
            ``instance_group``; ``execution``: "process", "thread" or "inline". ``parameters`` are a dict.

    Raises:
        GraphError: A keyword, value or annotation is wrong, on its line.
    """
    with _OnUsersLine():
        check_known(
            "@weft.model",
            fields,
            known_fields(ModelConfig.DESCRIPTOR, but=_SAID) | {"batching", "execution", "instances"},
        )
        return partial(model, **fields) if made_of is None else Model(made_of, fields)


class _OnUsersLine:
    """Has the traceback of a GraphError end on the line that it is about."""

    def __enter__(self) -> None: ...

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, GraphError):
            raise_at_place(error.with_traceback(None), "<module>")


def _config_of(
    name: str, inputs: Mapping[str, Any], outputs: Mapping[str, TensorType], fields: Mapping[str, Any]
) -> ModelConfig:
    config, given = ModelConfig(backend="python"), {"name": name, **fields}
    texts = dict(given.pop("parameters", {})).items()
    parameters = {key: json.dumps(value) if isinstance(value, bool | int | float) else value for key, value in texts}
    if execution := given.pop("execution", ""):
        if execution not in PythonBackend.execution_modes:
            raise fault("", f"execution={execution!r} must be one of {', '.join(PythonBackend.execution_modes)}")
        parameters[EXECUTION] = execution
    if optional := [name for name, one in outputs.items() if one.is_optional]:
        parameters[OPTIONAL_OUTPUTS_PARAMETER] = ",".join(optional)
    if (batching := given.pop("batching", None)) is not None:
        given["dynamic_batching"] = batching
    if (instances := given.pop("instances", None)) is not None:
        given["instance_group"] = {"count": instances} if isinstance(instances, int) else instances
    given["input"] = [one.declared(name) for name, one in inputs.items()]
    given["output"] = [
        {key: value for key, value in one.declared(name).items() if key != "optional"} for name, one in outputs.items()
    ]
    fill(config, {**given, "parameters": parameters}, "", Draft())
    return config


_IMPORTS = """\
import json as _json
import traceback as _traceback

import numpy as _np
import triton_python_backend_utils as _pb

"""
_CLASS = '''

_made_of = FUNCTION


class TritonPythonModel:
    """Calls FUNCTION with the inputs of requests, and checks what it returns."""

    def initialize(self, args):
        config = _json.loads(args["model_config"])
        self._has_rows = config["max_batch_size"] > 0
        self._outputs = {one["name"]: one for one in config["output"]}
        self._optional = config["parameters"].get("optional_outputs", {}).get("string_value", "").split(",")
        self._call = _made_of() if isinstance(_made_of, type) else _made_of

    def _checked(self, given, inputs):
        if not isinstance(given, dict):
            raise _pb.TritonModelException(f"FUNCTION must return a dict of outputs, got {type(given).__name__}")
        for name in given.keys() - self._outputs.keys():
            raise _pb.TritonModelException(f"FUNCTION returned '{name}'; its outputs are {', '.join(self._outputs)}")
        arrays = {}
        for name, output in self._outputs.items():
            if given.get(name) is None:
                if name not in self._optional:
                    raise _pb.TritonModelException(f"FUNCTION did not return output '{name}'")
                continue
            array, dtype = _np.asarray(given[name]), _np.dtype(_pb.triton_string_to_numpy(output["data_type"]))
            if array.dtype.kind in "SU":
                array = array.astype(object)
            if array.dtype != dtype:
                raise _pb.TritonModelException(
                    f"output '{name}' of FUNCTION is {array.dtype}, but must be {dtype}; use .astype('{dtype}')"
                )
            rows = [len(one) for one in inputs.values()][:1] if self._has_rows else []
            shape = rows + list(output.get("reshape", {}).get("shape", output["dims"]))
            if len(shape) != array.ndim or any(want not in (-1, got) for want, got in zip(shape, array.shape)):
                raise _pb.TritonModelException(
                    f"output '{name}' of FUNCTION has shape {list(array.shape)}, but must have {shape}"
                )
            arrays[name] = array
        return arrays

    def _response(self, arrays):
        return _pb.InferenceResponse([_pb.Tensor(name, array) for name, array in arrays.items()])

    def _failed(self, error):
        if not isinstance(error, _pb.TritonModelException):
            _pb.Logger.log_error(_traceback.format_exc())
            error = f"FUNCTION raised {type(error).__name__}; the log has more"
        return _pb.InferenceResponse(error=_pb.TritonError(str(error)))
'''
_EXECUTE = """
    def execute(self, requests):
        batch = [{one.name(): one.as_numpy() for one in request.inputs()} for request in requests]
        try:
            return self._run(batch)
        except Exception:
            if len(batch) == 1 or isinstance(_made_of, type):  # what it keeps may have changed
                raise
        responses = []
        for inputs in batch:
            try:
                responses += self._run([inputs])
            except Exception as error:
                responses.append(self._failed(error))
        return responses

    def _run(self, batch):
        inputs = batch[0]
        if len(batch) == 1:
            return [self._response(self._checked(self._call(**inputs), inputs))]
        if any(other.keys() != inputs.keys() for other in batch):
            raise ValueError("requests with different inputs")
        inputs = {name: _np.concatenate([one[name] for one in batch]) for name in inputs}
        ends = _np.cumsum([len(next(iter(one.values()))) for one in batch])[:-1]
        parts = {name: _np.split(array, ends) for name, array in self._checked(self._call(**inputs), inputs).items()}
        return [self._response({name: arrays[i] for name, arrays in parts.items()}) for i in range(len(batch))]
"""
_EXECUTE_STREAM = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            inputs = {one.name(): one.as_numpy() for one in request.inputs()}
            try:
                for given in self._call(**inputs):
                    if sender.is_cancelled():
                        break
                    sender.send(self._response(self._checked(given, inputs)))
                sender.send(flags=_pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception as error:
                sender.send(self._failed(error), _pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
