"""What the protocol files say to generators for Go and Java."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

PROTOS = Path(__file__).resolve().parents[3] / "protos"
NAMES = sorted(path.name for path in PROTOS.glob("*.proto"))


def run_protoc(*arguments: str, names: Sequence[str] = NAMES) -> None:
    """Without a flag for a package; in a process of its own, since protoc and OR-tools each bring a protobuf in C++."""
    include = f"-I{resources.files('grpc_tools') / '_proto'}"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", include, *arguments, *names]
    subprocess.run(command, check=True, timeout=60)


def test_each_file_names_its_packages_for_go_and_java(tmp_path: Path) -> None:
    """Files of one package of the protocol are one package of Go and one of Java; generators need no mapping."""
    run_protoc(f"--descriptor_set_out={tmp_path / 'set'}")
    files = FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file
    assert NAMES == sorted(file.name for file in files)
    by_package = {file.package: (file.options.go_package, file.options.java_package) for file in files}
    for file in files:
        assert "/" in file.options.go_package
        assert file.options.java_multiple_files
        assert by_package[file.package] == (file.options.go_package, file.options.java_package)
    assert len(set(by_package.values())) == len(by_package)


def test_java_is_generated_without_flags(tmp_path: Path) -> None:
    """The messages come to lie in the folder of their package; by protoc, where it is installed."""
    if shutil.which("protoc") is None:
        pytest.skip("needs protoc")
    subprocess.run(["protoc", f"-I{PROTOS}", f"--java_out={tmp_path}", *NAMES], check=True, timeout=60)
    assert (tmp_path / "weft/protos/inference/ModelInferRequest.java").exists()
    assert (tmp_path / "weft/protos/graph/GraphFeedbackRequest.java").exists()


def test_go_is_generated_without_flags(tmp_path: Path) -> None:
    """By protoc-gen-go, where it is installed, which takes the files of one package at a time."""
    if shutil.which("protoc-gen-go") is None:
        pytest.skip("needs protoc-gen-go")
    run_protoc(f"--go_out={tmp_path}", names=["grpc_service.proto", "model_config.proto"])
    folder = tmp_path / "weft/protos/inference"
    assert ["grpc_service.pb.go", "model_config.pb.go"] == sorted(path.name for path in folder.iterdir())
