"""``EXECUTION_ENV_PATH``: a model in an environment of its own, as a folder and as an archive, or refused by name."""

import asyncio
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
from tests.unit.serving.python.python_models import TIMEOUT_S, call

from weft.base.core import CallContext
from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.base.signature import ModelSignature
from weft.base.tensors import decode
from weft.serving.backends.base import InstanceContext, ModelContext
from weft.serving.backends.python import PythonBackend
from weft.serving.backends.python.service_end import ENVIRONMENT

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SOURCE = """
import json, sys
import numpy as np
import only_here
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [only_here.DIM]})
        return config

    def execute(self, requests):
        said = np.array([[only_here.__file__, sys.prefix]], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", said)]) for _ in requests]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with one package, which pip has installed from a folder; no network is needed."""
    folder = tmp_path_factory.mktemp("environment")
    package = folder / "package"
    package.mkdir()
    (package / "only_here.py").write_text("DIM = 7\n")
    (package / "pyproject.toml").write_text('[project]\nname = "only-here"\nversion = "1"\n')
    (package / "setup.py").write_text("import setuptools\n\nsetuptools.setup(py_modules=['only_here'])\n")
    root = folder / "env"
    venv.create(root, with_pip=False, symlinks=True)
    target = root / "lib" / f"python{VERSION}" / "site-packages"
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(package)], check=True)
    return root


@pytest.fixture
def archive(environment: Path, tmp_path: Path) -> Path:
    """The same, as conda-pack makes it: the environment is the top of the archive."""
    path = tmp_path / "m" / "env.tar.gz"
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w:gz") as file:
        for entry in environment.iterdir():
            file.add(entry, entry.name)
    return path


@pytest.mark.parametrize("given", ["{environment}", "$$TRITON_MODEL_DIRECTORY/env.tar.gz", "env.tar.gz"])
async def test_the_model_has_the_packages_and_the_interpreter(serve_python, environment, archive, given):
    """Those of the environment come first; what it lacks, as NumPy here, is that of the service."""
    parameters = {"EXECUTION": "process", ENVIRONMENT: given.format(environment=environment)}
    model = await serve_python(None, source=SOURCE, is_decoupled=False, num_instances=2, parameters=parameters)
    result = await asyncio.wait_for(model.infer(call(1), CallContext()), TIMEOUT_S)
    file, prefix = (Path(text.decode()) for text in decode(result.outputs["OUT"])[0])
    assert file.is_relative_to(prefix)
    assert (prefix == environment) == ("environment" in given)
    config = {"name": "m", "parameters": {ENVIRONMENT: {"string_value": parameters[ENVIRONMENT]}}}
    completed = await asyncio.to_thread(PythonBackend.auto_complete, config, archive.parent / "1")
    assert [7] == completed["input"][0]["dims"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot be read: No such file"),
        (lambda path: path.write_bytes(b"no archive"), "is no archive of an environment"),
        (lambda path: path.mkdir(), rf"has no lib/python3\.\*, but this service is Python {VERSION}"),
        (lambda path: (path / "lib" / "python3.7").mkdir(parents=True), "has Python 3.7, but this service is Python"),
        (
            lambda path: (path / "lib" / f"python{VERSION}").mkdir(parents=True),
            "has no bin/python that can be executed",
        ),
    ],
)
async def test_what_is_no_environment_of_this_python_is_refused_by_name(serve_python, tmp_path, make, message):
    """The fault names the parameter and the path."""
    path = tmp_path / "given"
    make(path)
    parameters = {"EXECUTION": "process", ENVIRONMENT: str(path)}
    with pytest.raises(InvalidArgumentError, match=f"model 'm': parameter '{ENVIRONMENT}': {path} {message}"):
        await serve_python(None, is_decoupled=False, parameters=parameters)


async def test_it_needs_a_process(serve_python):
    """On a thread of the service there is no other environment."""
    with pytest.raises(InvalidArgumentError, match=f"'{ENVIRONMENT}' needs a process of the model's own"):
        await serve_python(None, is_decoupled=False, parameters={ENVIRONMENT: "env"})


async def test_another_python_is_refused_by_the_greeting(tmp_path, monkeypatch):
    """An interpreter that is not what its folder says does not get as far as the model."""
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(SOURCE)
    monkeypatch.setattr("weft.serving.backends.python.process.VERSION", "3.0")
    signature = ModelSignature("m", "1", "python", 8, (), ())
    backend = PythonBackend(ModelContext(signature, folder, {}, {"EXECUTION": "process"}), InstanceContext("m_0"))
    with pytest.raises(
        UnavailableError, match=rf"its Python is {VERSION}, that of the service 3\.0: they must be the same"
    ):
        await asyncio.wait_for(backend.open(), TIMEOUT_S)
