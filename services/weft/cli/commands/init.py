"""``weft init``: writes a small working repository, or adds a model of Hugging Face to one."""

import argparse
import shlex
import sys
from pathlib import Path

from weft.base.errors import AlreadyExistsError, InvalidArgumentError
from weft.base.text.argument_types import add
from weft.tools.hub import download, find_snapshot, link_model

_MODEL_CONFIG = """\
# Names and types of what the model takes and gives; requests that come together are answered as one batch.
name: "double"
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
dynamic_batching { }
"""

_MODEL = '''\
"""Y = 2 X."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        """One response for each request, in order."""
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", 2 * x)]))
        return responses
'''

_GRAPH = """\
# Y = 4 X: the model, and the model again on what it gave.
name: "quadruple"
platform: "graph"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
node {
  name: "root"
  sequence {
    step { name: "once" model_name: "double" output_map { key: "Y" value: "twice_x" } }
    step { name: "again" model_name: "double" input_map { key: "X" value: "twice_x" } }
  }
}
"""

_README = """\
# A model repository

`model/double` is a Python model with its configuration, `graphs/quadruple` a graph that calls it.

    weft check .
    weft up --repository .
    weft infer quadruple --input X=[3]
    weft explain graphs/quadruple/1/graph.pbtxt --input X=[3]
"""

_REVISION = "main"
FILES = {
    "README.md": _README,
    "model/double/config.pbtxt": _MODEL_CONFIG,
    "model/double/1/model.py": _MODEL,
    "graphs/quadruple/1/graph.pbtxt": _GRAPH,
}


def write_starter(folder: Path) -> list[Path]:
    """Write the files to ``folder``, which is created; return them.

    Raises:
        AlreadyExistsError: It has files; nothing was written.
        OSError: It cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AlreadyExistsError(f"'{folder}' is there and not empty; give a new or empty folder")
    paths = [folder / name for name in FILES]
    for path, text in zip(paths, FILES.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return paths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft init``."""
    parser.description = (
        "Write a repository with a model, a graph and their configuration into a new or empty folder; or add a model "
        "that is in the cache of Hugging Face to a repository, as a link."
    )
    parser.epilog = "example: weft init mine && weft up --repository mine"
    add(parser, "folder DIR", "default with --hf: model_repository", Path, nargs="?")
    add(parser, "--hf ORG/NAME", "the model, in the cache ($HF_HOME, $HF_HUB_CACHE)")
    add(parser, f"--revision REV ({_REVISION})", "its branch, tag or commit")
    add(parser, "--download", "fetch it first; else the network is not used")


def run(options: argparse.Namespace) -> int:
    """Write the files and print their paths; 0. Raises WeftError and OSError."""
    if options.hf is not None:
        return _add_model(options.folder or Path("model_repository"), options)
    if options.download or options.revision != _REVISION:
        raise InvalidArgumentError("--download and --revision are of --hf ORG/NAME, which is not given")
    if options.folder is None:
        raise InvalidArgumentError("give a new or empty folder, or --hf ORG/NAME")
    for path in write_starter(options.folder):
        print(path)
    folder = shlex.quote(str(options.folder))
    print(f"next: weft up --repository {folder}, then: weft infer quadruple --input X=[3]", file=sys.stderr)
    return 0


def _add_model(repository: Path, options: argparse.Namespace) -> int:
    if options.download:
        download(options.hf, options.revision)
    snapshot = find_snapshot(options.hf, options.revision)
    config, version = link_model(repository, options.hf, snapshot)
    print(config)
    print(f"{version} -> {snapshot}")
    folder = shlex.quote(str(repository))
    print(
        f"linked, not copied: what is removed from the cache is gone here too\nnext: weft up --repository {folder} "
        f"--http-port 8000",
        file=sys.stderr,
    )
    return 0
