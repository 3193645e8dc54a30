"""Models of Triton's generators, and the model repositories of the rows."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

#: Generator, arguments and folder; after ``common/gen_qa_model_repository``.
_ONNX: Final = ("--onnx", "--onnx_opset=21")
#: Runs a generator so that ONNX Runtime can read what it makes, however new the package onnx is.
_RUN: Final = """
import onnx, runpy, sys
onnx.IR_VERSION = 10
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_GENERATED: Final = (
    ("gen_qa_models", _ONNX, "qa_model_repository"),
    ("gen_qa_models", (*_ONNX, "--variable"), "qa_variable_model_repository"),
    ("gen_qa_identity_models", _ONNX, "qa_identity_model_repository"),
    ("gen_qa_reshape_models", (*_ONNX, "--variable"), "qa_reshape_model_repository"),
    ("gen_qa_sequence_models", _ONNX, "qa_sequence_model_repository"),
    ("gen_qa_sequence_models", (*_ONNX, "--variable"), "qa_variable_sequence_model_repository"),
    ("gen_qa_implicit_models", _ONNX, "qa_sequence_implicit_model_repository"),
    ("gen_qa_implicit_models", (*_ONNX, "--variable"), "qa_variable_sequence_implicit_model_repository"),
    (
        "gen_qa_implicit_models",
        (*_ONNX, "--initial-state", "zero"),
        "qa_sequence_initial_state_implicit_model_repository",
    ),
    ("gen_qa_dyna_sequence_models", _ONNX, "qa_dyna_sequence_model_repository"),
    ("gen_qa_dyna_sequence_implicit_models", _ONNX, "qa_dyna_sequence_implicit_model_repository"),
    ("gen_qa_ragged_models", _ONNX, "qa_ragged_model_repository"),
    ("gen_qa_ort_scalar_models", _ONNX[1:], "qa_scalar_models"),
    *(
        (f"gen_qa_{kind}", ("--ensemble", *more), f"qa_ensemble_model_repository/{folder}_repository")
        for kind, more, folder in (
            ("models", (), "qa_model"),
            ("models", ("--variable",), "qa_variable_model"),
            ("identity_models", (), "qa_identity_model"),
            ("reshape_models", (), "qa_reshape_model"),
            ("sequence_models", (), "qa_sequence_model"),
            ("sequence_models", ("--variable",), "qa_variable_sequence_model"),
        )
    ),
)
#: Models in place of those in Triton's examples that are fetched or run in C++.
_HERE: Final = Path(__file__).parent
#: Backends of Triton's tests that are written in C++: models here do the same.
_IN_PYTHON: Final = {
    "identity": _HERE / "identity.py",
    "square": _HERE / "square.py",
    "repeat": _HERE.parent / "models" / "repeat_int32" / "1" / "model.py",
}


def generate(common: Path, into: Path) -> None:
    """Make the models, unless they are there."""
    for generator, arguments, folder in _GENERATED:
        if not (into / folder).exists():
            (into / folder).mkdir(parents=True)
            command = [sys.executable, "-c", _RUN, f"{generator}.py", *arguments, f"--models_dir={into / folder}"]
            subprocess.run(command, cwd=common, check=True, stdout=subprocess.DEVNULL)


class Repository(NamedTuple):
    """A model repository that is being made.

    Attributes:
        path: Where.
        qa: The checkout's ``qa``, in a copy.
        generated: The models of the generators.
        folder: Of the test in ``qa``.
    """

    path: Path
    qa: Path
    generated: Path
    folder: str

    def add(self, *patterns: str, name: str = "") -> None:
        """Copy model folders: of the generated ones, else of the test's folder, of ``qa`` or of ours."""
        for pattern in patterns:
            bases = (self.generated, self.qa / self.folder, self.qa, self.qa.parent, _HERE.parent)
            found = next((list(base.glob(pattern)) for base in bases if any(base.glob(pattern))), None)
            if found is None:
                raise FileNotFoundError(f"no model matches {pattern}")
            for model in found:
                shutil.copytree(model, self.path / (name or model.name), dirs_exist_ok=True)
                self.complete(name or model.name, model.name)

    def copy(self, model: str, name: str) -> None:
        """Copy a model of the repository under another name."""
        shutil.copytree(self.path / model, self.path / name)
        self.complete(name, model)

    def copy_version(self, model: str, version: str, name: str) -> None:
        """Copy a version of a model."""
        shutil.copytree(self.path / model / version, self.path / model / name)

    def edit(self, model: str, *changes: tuple[str, str]) -> None:
        """Replace texts, by regular expression, in the configurations of models that match."""
        for path in self.path.glob(f"{model}/config.pbtxt"):
            text = path.read_text()
            for pattern, replacement in changes:
                text = re.sub(pattern, replacement, text)
            path.write_text(text)

    def append(self, model: str, text: str) -> None:
        """Add a text to the configurations of models that match."""
        for path in self.path.glob(f"{model}/config.pbtxt"):
            path.write_text(f"{path.read_text()}\n{text}\n")

    def complete(self, folder: str, name: str = "") -> None:
        """Give a model its version folder and, for a backend of Triton's tests, a Python program."""
        model = self.path / folder
        name, config = name or folder, model / "config.pbtxt"
        if not config.exists():
            return
        text = config.read_text().replace("KIND_GPU", "KIND_CPU")
        if name != model.name:
            text = re.sub(rf'name: *"{re.escape(name)}"', f'name: "{model.name}"', text, count=1)
        versions = [path for path in model.iterdir() if path.name.isdecimal()]
        if not versions:
            (model / "1").mkdir()
        if (model / "model.py").exists():
            (model / "model.py").rename(model / "1" / "model.py")
        for backend, source in _IN_PYTHON.items():
            if re.search(rf'backend: *"{backend}"', text):
                text = re.sub(rf'backend: *"{backend}"', 'backend: "python"', text)
                text += '\nparameters [{ key: "EXECUTION" value { string_value: "thread" } }]\n'
                for version in versions or [model / "1"]:
                    shutil.copy(source, version / "model.py")
        config.write_text(text)
