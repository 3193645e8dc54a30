"""What runs: one row per start of the mesh, after the test.sh of Triton's folders."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.compat.triton_qa.repositories import Repository


@dataclass(frozen=True)
class Row:
    """A test file of one folder, and the mesh that it calls.

    Attributes:
        folder: In ``qa``.
        test: File in it.
        models: Fills the model repository.
        title: Tells the rows of a folder apart.
        cases: ``Class.test``; none: all of the file.
        options: Of ``weft up``.
        environment: Of the tests.
        server_environment: Of the mesh.
        differs: Cases that fail, by regular expression of their whole name, and why.
    """

    folder: str
    test: str
    models: Callable[[Repository], None]
    title: str = ""
    cases: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    server_environment: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)

    def allows(self, case: str) -> str:
        """Why a case may fail; "": it may not."""
        return next((why for pattern, why in self.differs.items() if re.fullmatch(pattern, case)), "")


_SHM: Final = ("--allow-client-shm", "--service-args=model=--allow-client-shm")
_CPU: Final = {"TRITON_SERVER_CPU_ONLY": "1"}


def _infer_onnx(repository: Repository) -> None:
    repository.add("qa_model_repository/onnx_*")
    ensembles = "qa_ensemble_model_repository/qa_model_repository"
    repository.add(f"{ensembles}/*onnx*", f"{ensembles}/nop_*")
    mixed = ("wrong_label_int32", "label_override_int32", "mix_type_int32", "mix_nobatch_batch_float32")
    repository.add(*(f"ensemble_models/{name}_float32_float32" for name in mixed))
    repository.add("ensemble_models/batch_to_nobatch_*", "ensemble_models/nobatch_to_batch_*")
    zero, dims = "custom_zero_1_float32", r"dims: \[ 1 \]"
    repository.add(f"custom_models/{zero}")
    repository.add(f"custom_models/{zero}", name=zero.replace("zero", "nobatch_zero"))
    repository.edit(zero, ("max_batch_size: 1", "max_batch_size: 8"), (dims, "dims: [ -1 ]"))
    repository.edit("custom_nobatch_*", ("max_batch_size: 1", "max_batch_size: 0"), (dims, "dims: [ -1, -1 ]"))


def _infer_python(kind: str) -> Callable[[Repository], None]:
    def models(repository: Repository) -> None:
        prefix = "" if kind == "python" else "dlpack_"
        for onnx in sorted((repository.generated / "qa_model_repository").glob("onnx_*")):
            if "bf16" in onnx.name:
                continue
            name = onnx.name.replace("onnx", kind)
            is_swapped = any(name.endswith("_".join([dtype] * 3)) for dtype in ("float32", "int32", "int16", "int8"))
            model = repository.path / name
            (model / "1").mkdir(parents=True)
            program = f"python_models/{prefix}{'sub_add' if is_swapped else 'add_sub'}/model.py"
            (model / "1" / "model.py").write_bytes((repository.qa / program).read_bytes())
            (model / "output0_labels.txt").write_bytes((onnx / "output0_labels.txt").read_bytes())
            (model / "config.pbtxt").write_text((onnx / "config.pbtxt").read_text())
        repository.edit("*", ("platform:.*", ""), ("version_policy.*", 'backend: "python"'), ("onnx", kind))

    return models


def _infer(title: str, models: Callable[[Repository], None], backends: str, *, shm: bool = False) -> Row:
    environment = {**_CPU, "BACKENDS": backends, "ENSEMBLES": str(int("onnx" in backends))}
    if shm:
        environment["TEST_SYSTEM_SHARED_MEMORY"] = "1"
    return Row("L0_infer", "infer_test.py", models, title, options=_SHM if shm else (), environment=environment)


ROWS: Final = (
    _infer("ONNX and ensembles", _infer_onnx, "onnx"),
    _infer("Python", _infer_python("python"), "python"),
    _infer("Python with DLPack", _infer_python("python_dlpack"), "python_dlpack"),
    _infer("ONNX in shared memory", _infer_onnx, "onnx", shm=True),
    _infer("Python in shared memory", _infer_python("python"), "python", shm=True),
)

#: Folders that are not run, and why.
NOT_RUN: Final = {}
