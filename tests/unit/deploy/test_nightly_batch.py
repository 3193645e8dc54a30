"""deploy/kubernetes/components/nightly-batch: a batch job each night that goes on where it was interrupted."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.unit.deploy.kustomization import Manifest, render
from tests.unit.deploy.test_kubernetes import FOLDER, KUBERNETES_VERSIONS

from weft.cli.__main__ import make_parser


@pytest.fixture
def manifests(tmp_path: Path) -> list[Manifest]:
    """Those of the base with the component."""
    overlay = {"resources": [str(FOLDER / "base")], "components": [str(FOLDER / "components/nightly-batch")]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return render(tmp_path)


def _found(manifests: list[Manifest], kind: str, name: str) -> dict[str, Any]:
    (manifest,) = (each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return manifest


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_it_fits_the_schema_and_what_it_names_is_there(manifests: list[Manifest], version: str) -> None:
    """Strictly; its claim, the router's Service and port, and a policy that lets it through."""
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)
    job = _found(manifests, "CronJob", "nightly-batch")["spec"]
    pod = job["jobTemplate"]["spec"]["template"]
    assert (job["concurrencyPolicy"], pod["spec"]["restartPolicy"]) == ("Forbid", "OnFailure")
    for volume in pod["spec"]["volumes"]:
        if claim := volume.get("persistentVolumeClaim"):
            _found(manifests, "PersistentVolumeClaim", claim["claimName"])
    assert _found(manifests, "Service", "router-endpoints")["spec"]["ports"][0]["port"] == 8001
    (rule,) = _found(manifests, "NetworkPolicy", "nightly-batch-to-router")["spec"]["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_a_container_that_starts_again_resumes(manifests: list[Manifest], tmp_path: Path) -> None:
    """Its script, run by a shell: a command line that `weft batch` reads, with --resume once a job was begun."""
    job = _found(manifests, "CronJob", "nightly-batch")["spec"]
    (container,) = job["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    told = tmp_path / "told.jsonl"
    weft = tmp_path / "bin/weft"
    weft.parent.mkdir()
    weft.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {told}\n')
    weft.chmod(0o755)
    environment = {"PATH": f"{weft.parent}:{os.environ['PATH']}", "DATA": str(tmp_path), "JOB_NAME": "nightly-7"}
    output = tmp_path / "answers/nightly-7"
    for _ in range(2):
        subprocess.run([*container["command"], *container["args"]], env=environment, check=True, timeout=30)
        output.mkdir(parents=True, exist_ok=True)
        (output / "manifest.json").write_text(json.dumps({}))
    first, second = (make_parser().parse_args(line.split()) for line in told.read_text().splitlines())
    assert (first.graph, first.output, first.url) == ("triage", output, "dns:///router-endpoints:8001")
    assert (first.resume, second.resume) == (False, True)
    for status, expected in ((3, 0), (1, 1)):
        weft.write_text(f"#!/bin/sh\nexit {status}\n")
        done = subprocess.run([*container["command"], *container["args"]], env=environment, check=False, timeout=30)
        assert done.returncode == expected
    assert vars(first) == vars(second) | {"resume": False}
