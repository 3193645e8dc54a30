"""compose.yaml, the Dockerfiles and what they name fit together."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft import __version__

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
OURS = ("router", "preprocess", "model", "postprocess")
BUILT = ("gateway", *OURS)
#: Every image, and the folders that it copies.
IMAGES = {name: {"protos/weft_protos", "services/weft"} for name in (*BUILT, "cli")}
IMAGES["model"] = IMAGES["cli"] = {"protos/weft_protos", "services/weft", "kernels/weft_kernels"}


def dockerfile(service: str) -> str:
    """Content of a service's Dockerfile."""
    return (ROOT / "deploy" / "docker" / f"{service}.Dockerfile").read_text()


def copies(service: str) -> list[tuple[str, str]]:
    """(source, destination) of each COPY."""
    found = []
    for line in re.findall(r"^COPY (.+)$", dockerfile(service), re.MULTILINE):
        *sources, destination = line.split()
        found += [(source, destination) for source in sources]
    return found


def host_ports(service: dict[str, Any]) -> list[str]:
    """Ports that a service takes on this machine."""
    return [mapping.rpartition(":")[0] for mapping in service.get("ports", [])]


def test_the_mesh_and_its_observers_are_there() -> None:
    """The services run beside Jaeger, Prometheus and Grafana."""
    assert set(COMPOSE["services"]) == {*BUILT, "jaeger", "prometheus", "grafana"}


def test_the_file_fits_the_schema_of_the_compose_specification() -> None:
    """Every key is known and every value has its type, by the schema that check-jsonschema ships."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    checked = subprocess.run([*command, str(ROOT / "compose.yaml")], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout.strip()) == (0, "ok -- validation done"), checked.stdout


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_an_image_is_built_here_or_pinned(name: str) -> None:
    """An image is built from an existing Dockerfile or pinned to a version."""
    service = COMPOSE["services"][name]
    if name in BUILT:
        assert (ROOT / service["build"]["dockerfile"]).is_file()
    else:
        assert re.fullmatch(r"[\w./-]+:v?\d[\w.]+", service["image"])


def test_dependencies_exist_and_can_be_healthy() -> None:
    """A service waits only for services that are there, and whose image has a health check."""
    for service in COMPOSE["services"].values():
        for name, condition in service.get("depends_on", {}).items():
            assert name in COMPOSE["services"]
            assert condition == {"condition": "service_healthy"}
            assert "HEALTHCHECK" in dockerfile(name)


def test_host_ports_are_unique_and_local() -> None:
    """No two services want one port of the machine, and none is open to other machines."""
    ports = [port for service in COMPOSE["services"].values() for port in host_ports(service)]
    assert len(ports) == len(set(ports))
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("name", OURS)
def test_models_are_read_only_and_traces_go_to_jaeger(name: str) -> None:
    """Every service of the mesh sees the repository read-only and exports to the Jaeger beside it."""
    service = COMPOSE["services"][name]
    assert service["volumes"] == ["./model_repository:/models:ro"]
    assert service["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://jaeger:4317"


def test_the_router_targets_the_ports_that_the_images_open() -> None:
    """Each target is a service of this file, on its gRPC port."""
    targets = dict(re.findall(r"--target=(\w+)=dns:///(\w+:\d+)", " ".join(COMPOSE["services"]["router"]["command"])))
    assert set(targets) == set(OURS) - {"router"}
    for name, address in targets.items():
        port = re.search(r"^EXPOSE (\d+)", dockerfile(name), re.MULTILINE)
        assert port is not None
        assert address == f"{name}:{port[1]}"


def test_prometheus_scrapes_the_metrics_port_of_every_service() -> None:
    """The scrape targets are the second port of each image."""
    volume, _ = COMPOSE["services"]["prometheus"]["volumes"]
    source, destination, mode = volume.split(":")
    assert (destination, mode) == ("/etc/prometheus/prometheus.yml", "ro")
    (job,) = yaml.safe_load((ROOT / source).read_text())["scrape_configs"]
    expected = {f"{name}:{re.search(r'EXPOSE [0-9]+ ([0-9]+)', dockerfile(name))[1]}" for name in BUILT}  # type: ignore[index]
    assert set(job["static_configs"][0]["targets"]) == expected


def test_whatever_is_mounted_is_there() -> None:
    """Every file and folder that a container mounts is in the repository, the alert rules among them."""
    volumes = [volume for service in COMPOSE["services"].values() for volume in service.get("volumes", [])]
    assert all((ROOT / volume.split(":")[0]).exists() for volume in volumes)
    assert any(volume.endswith("/etc/prometheus/alerts.yml:ro") for volume in volumes)


@pytest.mark.parametrize("service", IMAGES)
def test_an_image_copies_what_it_runs(service: str) -> None:
    """COPY names the package, the module that models import, the messages and, where models run, the kernels."""
    packages = {(source, destination) for source, destination in copies(service) if "/" in source}
    module = ("services/triton_python_backend_utils.py", "services/")
    assert {module, *((folder, folder) for folder in IMAGES[service])} == packages
    assert all((ROOT / source).exists() for source, _ in copies(service))


@pytest.mark.parametrize("service", IMAGES)
def test_an_image_is_small_and_does_not_run_as_root(service: str) -> None:
    """Only the model image installs torch; versions are those of constraints.txt; the user is nobody."""
    text = dockerfile(service)
    (install,) = re.findall(r"^RUN pip install .*$", text, re.MULTILINE)
    assert "--constraint constraints.txt" in install
    assert ("torch" in install) == (service == "model")
    assert re.search(r"^USER 65534$", text, re.MULTILINE)


@pytest.mark.parametrize("service", IMAGES)
def test_an_image_has_what_a_service_of_a_mesh_takes(service: str) -> None:
    """The extra that it installs is `mesh`, or has it: the base package alone exports no traces."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (installed,) = re.findall(
        r"^(?:ARG EXTRAS=|RUN pip install .*)\"\.?\[([\w,]+)\]\"", dockerfile(service), re.MULTILINE
    )
    names = installed.split(",")
    for name in names:  # which grows
        names += [more for text in extras[name] if text.startswith("weft-mesh[") for more in text[10:-1].split(",")]
    assert "mesh" in names


@pytest.mark.parametrize("service", OURS)
def test_an_image_checks_its_own_port(service: str) -> None:
    """The health check asks the first port that the image opens."""
    text = dockerfile(service)
    port = re.search(r"^EXPOSE (\d+) (\d+)$", text, re.MULTILINE)
    assert port is not None
    assert int(port[2]) == int(port[1]) + 1
    assert f'"weft.v2.healthcheck", "127.0.0.1:{port[1]}"]' in text
    assert importlib.util.find_spec("weft.v2.healthcheck") is not None


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder in which what an image copies is installed, by pip as its Dockerfile says but without dependencies."""
    done: dict[tuple[object, ...], Path] = {}

    def install(service: str) -> Path:
        what = _only(r"^RUN pip install .* (\"\.\S*\")", service).strip('"').replace("$EXTRAS", "[mesh]")
        key = (*sorted(copies(service)), what.partition("[")[0])
        if key not in done:
            done[key] = tmp_path_factory.mktemp(service)
            _install(service, what, done[key])
        return done[key]

    return install


@pytest.mark.parametrize("service", IMAGES)
def test_an_image_is_replayed(service: str, installed: Callable[[str], Path], tmp_path: Path) -> None:
    """What COPY names, installed, serves by its ENTRYPOINT; images of the same files share an installation."""
    site = installed(service)
    entrypoint = json.loads(_only(r"^ENTRYPOINT (\[.*\])$", service))
    if service == "cli":
        with _run(site, [*entrypoint, "--version"]) as process:
            assert f"weft-mesh {__version__}\n" == process.communicate(timeout=60)[0]
        return
    folder = {"/models/graphs": "graphs"}.get(entrypoint[-1], service)
    if service != "gateway":
        (tmp_path / folder).mkdir(parents=True)
        entrypoint[-1] = str(tmp_path / folder)
    ports = ["--port", "0"] if service == "gateway" else ["--grpc-port", "0"]
    needs = {"gateway": ["--router", "127.0.0.1:1"], "router": ["--target", "model=127.0.0.1:1"]}.get(service, [])
    with _run(site, [*entrypoint, *ports, "--metrics-port", "0", "--stop-with-stdin", *needs]) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["service"] == service
        process.communicate(timeout=60)  # closes its standard input
    assert process.returncode == 0


def _only(pattern: str, service: str) -> str:
    (found,) = re.findall(pattern, dockerfile(service), re.MULTILINE)
    return str(found)


def _install(service: str, what: str, folder: Path) -> None:
    """Run the image's `pip install` on copies, into ``folder``/site."""
    for source, destination in copies(service):
        target = folder / "src" / destination
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, target)
    options = ["--no-deps", "--no-build-isolation", "--no-compile", "--no-index", "--target", str(folder / "site")]
    command = [sys.executable, "-m", "pip", "install", *options, what]
    done = subprocess.run(command, cwd=folder / "src", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stdout + done.stderr


def _run(folder: Path, entrypoint: list[str]) -> "subprocess.Popen[str]":
    """Start an ENTRYPOINT on what was installed into ``folder``/site, and on no source of this repository."""
    module = "weft.cli" if entrypoint[0] == "weft" else entrypoint[2]
    arguments = entrypoint[1:] if entrypoint[0] == "weft" else entrypoint[3:]
    tree = tuple(str(ROOT / name) for name in ("services", "protos", "kernels"))
    code = (
        "import runpy, sys\n"
        f"sys.path[:] = [{str(folder / 'site')!r}] + [path for path in sys.path if not path.startswith({tree})]\n"
        f"sys.argv = {[module, *arguments]}\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-P", "-c", code], cwd=folder, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def test_the_image_for_gpus_can_compile() -> None:
    """Triton's compiler and torch.compile find a compiler, and caches that a user without a home can write."""
    text = dockerfile("model")
    assert "--no-install-recommends g++" in text
    folders = re.findall(r"(?:TRITON_CACHE_DIR|TORCHINDUCTOR_CACHE_DIR|XDG_CACHE_HOME)=(\S+)", text)
    assert len(folders) == 3
    assert all(folder.startswith("/tmp/") for folder in folders)  # in the container


def test_the_image_without_cuda_has_no_compiler() -> None:
    """The index that compose.yaml takes torch from by default is one for which none is installed."""
    arguments = COMPOSE["services"]["model"]["build"]["args"]
    assert arguments["PIP_EXTRA_INDEX_URL"].rstrip("}").endswith("/cpu")
    assert "*/cpu) ;;" in dockerfile("model")
