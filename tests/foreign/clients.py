"""gRPC clients in other languages: what each needs, how it is built, and a run of one of its cases.

Sources lie in a folder for each language; what is built from them goes to ``build/``, anew when a source changes. Each
program takes a case and arguments ``name=value``, and ends with status 0 if the case holds, with 77 if it cannot do it.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROTOS = HERE.parents[1] / "protos"
BUILD = HERE / "build"
GO_SOURCES = Path("/usr/share/gocode")
CANNOT = 77


class MissingToolError(Exception):
    """What a client is built or run with is not installed."""


class CannotError(Exception):
    """The client cannot do this case; says why."""


class ForeignClient:
    """A client that is built.

    Args:
        command: Runs it.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command

    def run(self, case: str, *, timeout_s: float = 120.0, **arguments: object) -> str:
        """What it prints when the case holds.

        Raises:
            CannotError: The client has no such case.
            AssertionError: The case does not hold; the message is the client's.
        """
        done = subprocess.run(
            self._arguments(case, arguments), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode == CANNOT:
            raise CannotError(done.stderr.strip())
        assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-3000:]}{done.stdout[-500:]}"
        return done.stdout

    @contextmanager
    def running(self, case: str, **arguments: object) -> Iterator[None]:
        """Within, the case runs: it has printed a line; at the end its standard input ends, and it must hold.

        Raises:
            AssertionError: It does not hold.
        """
        process = subprocess.Popen(
            self._arguments(case, arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            if process.stdout.readline():
                yield
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 0, f"status {process.returncode}: {errors[-3000:]}{output[-500:]}"

    def _arguments(self, case: str, arguments: dict[str, object]) -> list[str]:
        return [*self._command, case, *(f"{name}={value}" for name, value in arguments.items())]


def built(language: str) -> ForeignClient:
    """The client in ``language``, built if it is not.

    Raises:
        MissingToolError: Something is not installed.
        subprocess.CalledProcessError: The build failed.
    """
    needed, build = _LANGUAGES[language]
    for tool in needed:
        if not (Path(tool).exists() if tool.startswith("/") else shutil.which(tool)):
            raise MissingToolError(f"the client in {language} needs {tool}")
    BUILD.mkdir(exist_ok=True)
    with (BUILD / f"{language}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        digest = _digest(language)
        stamp = BUILD / f"{language}.stamp"
        is_built = stamp.exists() and stamp.read_text() == digest
        command = build(not is_built)
        stamp.write_text(digest)
    return ForeignClient(command)


def _digest(language: str) -> str:
    digest = hashlib.sha256()
    for path in sorted([*(HERE / language).iterdir(), *PROTOS.glob("*.proto")]):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _build(*command: object, cwd: Path = HERE, environment: dict[str, str] | None = None) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, env=os.environ | (environment or {}), check=True)


def _go(is_stale: bool) -> list[str]:
    program, path = BUILD / "client-go", BUILD / "go"
    if is_stale:
        generated = path / "src" / "inference"
        generated.mkdir(parents=True, exist_ok=True)
        names = [proto.name for proto in _protos()]
        options = ",".join(["plugins=grpc", *(f"M{name}=inference" for name in names)])
        _build("protoc", f"-I{PROTOS}", f"--go_out={options}:{generated}", *names)
        environment = {"GO111MODULE": "off", "GOPATH": f"{path}:{GO_SOURCES}", "GOCACHE": str(BUILD / "go-cache")}
        _build("go", "build", "-o", program, "./go", environment=environment)
    return [str(program)]


def _node(is_stale: bool) -> list[str]:
    folder = BUILD / "node"
    if is_stale:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(HERE / "node", folder)
        _build("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", cwd=folder)
    return ["node", str(folder / "client.js"), str(PROTOS)]


def _cpp(is_stale: bool) -> list[str]:
    program, folder = BUILD / "client-cpp", BUILD / "cpp"
    if is_stale:
        folder.mkdir(exist_ok=True)
        plugin = shutil.which("grpc_cpp_plugin")
        protos = [proto.name for proto in _protos()]
        _build("protoc", f"-I{PROTOS}", f"--cpp_out={folder}", f"--grpc_out={folder}",
               f"--plugin=protoc-gen-grpc={plugin}", *protos)  # fmt: skip
        sources = [*(HERE / "cpp").glob("*.cc"), *folder.glob("*.pb.cc")]
        _build("g++", "-std=c++17", "-O1", f"-I{folder}", "-o", program, *sources,
               "-Wl,--copy-dt-needed-entries", "-lgrpc++", "-lgrpc", "-lprotobuf", "-lpthread")  # fmt: skip
    return [str(program)]


def _protos() -> list[Path]:
    return [PROTOS / "grpc_service.proto", PROTOS / "model_config.proto"]


_LANGUAGES: dict[str, tuple[tuple[str, ...], Callable[[bool], list[str]]]] = {
    "go": (("go", str(GO_SOURCES / "src/google.golang.org/grpc"), "protoc", "protoc-gen-go"), _go),
    "node": (("node", "npm"), _node),
    "cpp": (("g++", "protoc", "grpc_cpp_plugin", "/usr/include/grpcpp/grpcpp.h"), _cpp),
}
LANGUAGES = tuple(_LANGUAGES)
