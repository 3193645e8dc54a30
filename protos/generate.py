"""Generate ``weft_protos`` (messages, gRPC stubs, type stubs) from the ``.proto`` files beside this script.

``comments.json`` has what the files say of messages, fields, enums and values of a ``graph.pbtxt`` or
``config.pbtxt``, by full name: generated messages do not carry it.

The files keep the flat names that tritonclient's descriptors carry, so that both may live in one process; protoc
therefore writes ``import model_config_pb2``, which is rewritten here to an import from the package. Options for Go and
Java are left out of the Python modules for the same reason.

Usage: ``python protos/generate.py [OUTPUT_DIR]`` (default: ``protos/weft_protos``).
"""

import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

PROTO_DIR = Path(__file__).resolve().parent
OTHER_LANGUAGES = re.compile(r"^option (?:go|java)_\w+ = .*;\n", re.MULTILINE)
#: Whose comments editors show.
DOCUMENTED = ("model_config.proto", "graph.proto")
FLAT_IMPORT = re.compile(r"^import (\w+_pb2)( as \w+)?$", re.MULTILINE)


def generate(output_dir: Path) -> list[Path]:
    """Write the generated modules for every ``.proto`` file and return their paths, sorted.

    Raises:
        RuntimeError: protoc rejected a file; its message is on standard error.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    protos = sorted(path.name for path in PROTO_DIR.glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        for proto in protos:
            plain = OTHER_LANGUAGES.sub("", (PROTO_DIR / proto).read_text())
            (Path(folder) / proto).write_text(plain)
        _run_protoc(Path(folder), output_dir, protos)
        described = FileDescriptorSet.FromString((Path(folder) / "descriptors").read_bytes())
    files = {file.name: file for file in described.file}
    comments = dict(entry for name in DOCUMENTED for entry in _comments(files[name]))
    table = output_dir / "comments.json"
    table.write_text(json.dumps(comments, indent=0, ensure_ascii=False) + "\n")
    return [table, *_rewritten(output_dir, protos)]


def _comments(file: FileDescriptorProto) -> Iterator[tuple[str, str]]:
    """Full name and comment of what has one; the name of an enum's value has that of the enum before it."""
    for location in file.source_code_info.location:
        if not location.leading_comments or len(location.path) % 2:
            continue
        item, names = file, [file.package]
        for number, index in zip(location.path[::2], location.path[1::2], strict=True):
            item = getattr(item, item.DESCRIPTOR.fields_by_number[number].name)[index]
            names.append(item.name)
        yield ".".join(names), " ".join(location.leading_comments.split())


def _run_protoc(proto_dir: Path, output_dir: Path, protos: list[str]) -> None:
    scripts = Path(sysconfig.get_path("scripts"))
    # In a process of its own: protoc and OR-tools each bring a protobuf in C++, which abort beside one another.
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        *(f"--plugin={plugin}={scripts / plugin}" for plugin in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")),
        f"-I{proto_dir}",
        f"-I{resources.files('grpc_tools') / '_proto'}",
        f"--python_out={output_dir}",
        f"--grpc_python_out={output_dir}",
        f"--mypy_out=quiet:{output_dir}",
        f"--mypy_grpc_out=quiet:{output_dir}",
        f"--descriptor_set_out={proto_dir / 'descriptors'}",
        "--include_source_info",
        *protos,
    ]
    if subprocess.run(command, check=False).returncode != 0:
        raise RuntimeError("protoc failed")


def _rewritten(output_dir: Path, protos: list[str]) -> list[Path]:
    """Paths of the modules, whose imports are from the package; those without a service have no stubs."""
    for proto in protos:
        service_module = output_dir / f"{Path(proto).stem}_pb2_grpc.py"
        if "service " not in re.sub(r"//.*", "", (PROTO_DIR / proto).read_text()):
            service_module.unlink()
            service_module.with_suffix(".pyi").unlink(missing_ok=True)
    written = sorted(output_dir.glob("*_pb2*.py*"))
    for path in written:
        text = path.read_text()
        if path.suffix == ".pyi":
            text = re.sub(r"^import (\w+_pb2) as (\w+)$", r"from weft_protos import \1 as \2", text, flags=re.MULTILINE)
        text = FLAT_IMPORT.sub(r"from weft_protos import \1\2", text)
        path.write_text(text)
    return written


if __name__ == "__main__":
    for generated in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTO_DIR / "weft_protos"):
        print(generated)
