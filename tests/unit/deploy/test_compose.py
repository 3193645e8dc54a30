"""compose.yaml, the Dockerfiles and what they name fit together."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
OURS = ("router", "preprocess", "model", "postprocess")
BUILT = ("gateway", *OURS)
#: Packages that an image may hold: its own and the layers below it.
BASE = {"protos/weft_protos", "services/weft/wire", "services/weft/base"}
SERVING = BASE | {"services/weft/serving"}
PACKAGES = {
    "gateway": BASE | {"services/weft/jobs", "services/weft/gateway"},
    "router": BASE | {"services/weft/router"},
    "preprocess": SERVING | {"services/weft/services/preprocess"},
    "model": SERVING | {"services/weft/services/model", "kernels/weft_kernels"},
    "postprocess": SERVING | {"services/weft/services/postprocess"},
}
PACKAGES["cli"] = set().union(*PACKAGES.values()) | {
    "services/weft/mesh",
    "services/weft/tools",
    "services/weft/optimize",
    "services/weft/capacity",
    "services/weft/cli",
}


def dockerfile(service: str) -> str:
    """Content of a service's Dockerfile."""
    return (ROOT / "services" / service / "Dockerfile").read_text()


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


@pytest.mark.parametrize("service", PACKAGES)
def test_an_image_holds_the_packages_that_its_layer_may_import(service: str) -> None:
    """COPY names exactly the service's package and the layers below it, each from where it is to the same place."""
    packages = {(source, destination) for source, destination in copies(service) if "/" in source}
    assert packages == {(package, package) for package in PACKAGES[service]}
    assert all((ROOT / source).exists() for source, _ in copies(service))


@pytest.mark.parametrize("service", PACKAGES)
def test_an_image_is_small_and_does_not_run_as_root(service: str) -> None:
    """Only the model image installs torch; versions are those of constraints.txt; the user is nobody."""
    text = dockerfile(service)
    (install,) = re.findall(r"^RUN pip install .*$", text, re.MULTILINE)
    assert "--constraint constraints.txt" in install
    assert ("model" in install) == (service == "model")
    assert re.search(r"^USER 65534$", text, re.MULTILINE)


@pytest.mark.parametrize("service", PACKAGES)
def test_an_image_has_what_a_service_of_a_mesh_takes(service: str) -> None:
    """The extra that it installs is `mesh`, or has it: the base package alone has neither conditions nor traces."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (installed,) = re.findall(r"^(?:ARG EXTRAS=|RUN pip install .*)\"\.?\[(\w+)\]\"", dockerfile(service), re.MULTILINE)
    assert installed == "mesh" or "weft-mesh[mesh]" in extras[installed]


@pytest.mark.parametrize("service", OURS)
def test_an_image_checks_its_own_port(service: str) -> None:
    """The health check asks the first port that the image opens."""
    text = dockerfile(service)
    port = re.search(r"^EXPOSE (\d+) (\d+)$", text, re.MULTILINE)
    assert port is not None
    assert int(port[2]) == int(port[1]) + 1
    assert f'"weft.v2.healthcheck", "127.0.0.1:{port[1]}"]' in text
    assert importlib.util.find_spec("weft.v2.healthcheck") is not None


@pytest.mark.parametrize("service", PACKAGES)
def test_a_service_starts_with_the_packages_of_its_image(service: str, tmp_path: Path) -> None:
    """The service's entry point imports where no other package of Weft is."""
    for source, _ in copies(service):
        if "/" in source:
            shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
    image = [str((tmp_path / source).parent) for source in PACKAGES[service]]
    tree = (str(ROOT / "services"), str(ROOT / "protos"))
    code = (
        "import runpy, sys\n"
        f"sys.path[:] = {image} + [path for path in sys.path if not path.startswith({tree})]\n"
        f"sys.argv = ['weft_{service}', '--help']\n"
        f"runpy.run_module('weft_{service}', run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "usage: weft" in result.stdout


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
