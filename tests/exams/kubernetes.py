"""Applies deploy/kubernetes to a real API server on loopback, with scheduler, controllers and make-believe nodes.

    python -m tests.exams.kubernetes DIR [--crds DIR ...] [--rollouts N] [--update-docs]

``DIR`` has kube-apiserver, kube-controller-manager, kube-scheduler and etcd (docs/kubernetes.md says how they are
made); kubectl is on the PATH. ``--crds``: files with the definitions of KEDA, the Prometheus operator, the Gateway API,
its inference extension, LeaderWorkerSet and KServe. Prints a row for each fact; the status is 1 if one does not hold.
"""

import argparse
import base64
import contextlib
import json
import os
import re
import secrets
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.unit.deploy.kustomization import matches

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/kubernetes"
PAGE = ROOT / "docs/kubernetes.md"
_BEGIN, _END = "<!-- exam -->\n", "<!-- /exam -->\n"
SERVICES = ("router", "preprocess", "model", "postprocess")
NAMESPACE = "weft"
#: How long a state may take to come, in seconds: the control plane shares the machine.
WAIT_S = 120.0

#: Of ``kubectl apply``: nothing changes, and the fields are not those of whoever applied before.
_TRIAL = ("--server-side", "--dry-run=server", "--force-conflicts", "--field-manager=exam")

Object = dict[str, Any]


class ControlPlane:
    """etcd, API server, controllers and scheduler as processes of this one, which end with it."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(16)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._binaries = binaries
        etcd, peer, self.port = free_port(), free_port(), free_port()
        self._certificates()
        self.start(
            "etcd", "--data-dir", folder / "etcd", "--unsafe-no-fsync", "--listen-client-urls", f"http://127.0.0.1:{etcd}",
            "--advertise-client-urls", f"http://127.0.0.1:{etcd}", "--listen-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-cluster", f"default=http://127.0.0.1:{peer}",
        )  # fmt: skip
        self.start(
            "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{etcd}", "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1", f"--secure-port={self.port}", f"--tls-cert-file={folder}/api.crt",
            f"--tls-private-key-file={folder}/api.key", f"--client-ca-file={folder}/api.crt",
            "--service-cluster-ip-range=10.0.0.0/16", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder}/api.key", f"--service-account-signing-key-file={folder}/api.key",
            "--authorization-mode=RBAC", f"--token-auth-file={folder}/tokens.csv", "--endpoint-reconciler-type=none",
            "--enable-admission-plugins=NodeRestriction,ResourceQuota,LimitRanger",
            "--disable-admission-plugins=TaintNodesByCondition", f"--cert-dir={folder}",
        )  # fmt: skip
        self.config = self._kubeconfig()
        until("the API server answers", lambda: self.call("GET", "/readyz", text=True) == "ok")
        configs = [
            f"--{name}={self.config}"
            for name in ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        ]
        common = [*configs, "--leader-elect=false", "--bind-address=127.0.0.1", f"--cert-dir={folder}"]
        self.start(
            "kube-controller-manager", *common, f"--secure-port={free_port()}", f"--root-ca-file={folder}/api.crt",
            f"--service-account-private-key-file={folder}/api.key", "--horizontal-pod-autoscaler-sync-period=2s",
            "--controllers=*,-nodelifecycle,-node-lifecycle-controller,-taint-eviction-controller,-nodeipam",
        )  # fmt: skip
        self.start("kube-scheduler", *common, f"--secure-port={free_port()}")

    def start(self, name: str, *arguments: object) -> None:
        """Start one of the binaries, with its output in a file of its name."""
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [str(self._binaries / name), *map(str, arguments)]
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def close(self) -> None:
        """End every process, the last one first."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()

    def call(self, method: str, path: str, body: Object | None = None, *, text: bool = False) -> Any:
        """The answer of the API server, or None if it refuses or does not answer."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.token}", "Content-Type": kind},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, context=self._tls, timeout=10) as response:
                return response.read().decode() if text else json.load(response)
        except (urllib.error.URLError, OSError):
            return None

    def kubectl(self, *arguments: object, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run kubectl as administrator."""
        command = ["kubectl", f"--kubeconfig={self.config}", *map(str, arguments)]
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=False)

    def pods(self, namespace: str = NAMESPACE) -> list[Object]:
        """Pods that do not end."""
        found = self.call("GET", f"/api/v1/namespaces/{namespace}/pods") or {"items": []}
        return [pod for pod in found["items"] if not pod["metadata"].get("deletionTimestamp")]

    def _certificates(self) -> None:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
             "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", self.folder / "api.key",
             "-out", self.folder / "api.crt"],
            check=True, capture_output=True,
        )  # fmt: skip
        (self.folder / "tokens.csv").write_text(f'{self.token},admin,admin,"system:masters"\n')
        self._tls = ssl.create_default_context(cafile=self.folder / "api.crt")

    def _kubeconfig(self) -> Path:
        authority = base64.b64encode((self.folder / "api.crt").read_bytes()).decode()
        server = {"server": f"https://127.0.0.1:{self.port}", "certificate-authority-data": authority}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "exam", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [{"name": "exam", "context": {"cluster": "exam", "user": "admin"}}],
            "current-context": "exam",
        }
        path = self.folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path


class Nodes:
    """Two nodes with CPUs and two with GPUs; their pods are ready a second after they are placed, and end at once.

    Attributes:
        fewest: The smallest number of ready pods of each service since ``watch``.
        crashing: Services whose pods never become ready.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self.fewest: dict[str, int] = {}
        self.crashing: set[str] = set()
        self._plane = plane
        self._placed_s: dict[str, float] = {}
        self._num_addresses = 0
        for name, gpus in (("cpu-a", 0), ("cpu-b", 0), ("gpu-a", 8), ("gpu-b", 8)):
            self._add(name, gpus)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Stop; nothing becomes ready any more."""
        self._stop.set()
        self._thread.join()

    def watch(self) -> None:
        """Count anew."""
        self.fewest = {}

    def _add(self, name: str, gpus: int) -> None:
        taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
        labels = {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": name[-1], "kubernetes.io/os": "linux"}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        self._plane.call("POST", "/api/v1/nodes", node | {"spec": {"taints": [taint] if gpus else []}})
        room = {"cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "200Gi"}
        room |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": _now()}
        status = {"capacity": room, "allocatable": room, "conditions": [ready | {"lastTransitionTime": _now()}]}
        self._plane.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})

    def _run(self) -> None:
        while not self._stop.wait(0.3):
            found = self._plane.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")
            ready: Counter[str] = Counter()
            for pod in (found or {"items": []})["items"]:
                meta, app = pod["metadata"], _app(pod)
                if meta.get("deletionTimestamp"):
                    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{meta['name']}"
                    self._plane.call("DELETE", path, {"gracePeriodSeconds": 0})
                elif is_ready(pod):
                    ready[app] += 1
                elif pod["spec"].get("nodeName") and app not in self.crashing and self._age_s(meta["name"]) > 1:
                    self._start(pod)
            if found is not None:
                for name in SERVICES:
                    self.fewest[name] = min(self.fewest.get(name, 1 << 30), ready[name])

    def _age_s(self, name: str) -> float:
        """Since the pod was seen on a node."""
        return time.monotonic() - self._placed_s.setdefault(name, time.monotonic())

    def _start(self, pod: Object) -> None:
        self._num_addresses += 1
        address = f"10.244.{self._num_addresses // 250}.{self._num_addresses % 250 + 1}"
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": _now()}
            for kind in ("Ready", "ContainersReady", "Initialized", "PodScheduled")
        ]
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "startTime": _now()}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}/status"
        self._plane.call("PATCH", path, {"status": status | {"conditions": conditions}})


def _now() -> str:
    return datetime.now(UTC).strftime("%FT%TZ")


def _app(pod: Object) -> str:
    return str(pod["metadata"].get("labels", {}).get("app.kubernetes.io/name", ""))


def is_ready(pod: Object) -> bool:
    """Whether the pod takes calls."""
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def until(what: str, holds: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    """Wait for a state. Raises TimeoutError that names it."""
    end_s = time.monotonic() + wait_s
    while not holds():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {wait_s:.0f} s: {what}")
        time.sleep(0.3)


class Exam:
    """The facts, each a row: what was done, and what was seen."""

    def __init__(self, plane: ControlPlane, nodes: Nodes, num_rollouts: int) -> None:
        self.rows: list[tuple[str, str, bool]] = []
        self._plane, self._nodes, self._num_rollouts = plane, nodes, num_rollouts

    def row(self, what: str, seen: str, *, holds: bool) -> None:
        """Record and print one."""
        self.rows.append((what, seen, holds))
        print(f"{'ok  ' if holds else 'FAIL'} {what}: {seen}", flush=True)

    def apply(self, folder: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Apply a kustomization strictly."""
        return self._plane.kubectl("apply", "--validate=strict", *options, "-k", FOLDER / folder)

    def settled(self) -> bool:
        """Every service has two ready pods at least, and no pod is on its way."""
        pods = self._plane.pods()
        ready = Counter(_app(pod) for pod in pods if is_ready(pod))
        return all(ready[name] >= 2 for name in SERVICES) and all(is_ready(p) for p in pods if _app(p) in SERVICES)

    def run(self, crds: list[Path]) -> None:
        """All facts, in order: each builds on the objects of the one before."""
        self._models()
        self._production_without_keda()
        for path in crds:
            applied = self._plane.kubectl("apply", "--server-side", "-f", path)
            assert 0 == applied.returncode, applied.stderr
        self._overlays(has_keda=bool(crds))
        self._changes()
        self._rollouts()
        self._drain()
        self._quota()
        self._policies()
        self._language_models()
        if crds:
            self._components()

    def _models(self) -> None:
        claim = self._plane.kubectl("apply", "-k", FOLDER / "models")
        if claim.returncode:  # the namespace comes with base
            self._plane.kubectl("create", "-f", FOLDER / "base/namespace.yaml")
            claim = self._plane.kubectl("apply", "-k", FOLDER / "models")
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": "models"},
            "spec": {
                "capacity": {"storage": "20Gi"},
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "claimRef": {"namespace": NAMESPACE, "name": "models"},
                "hostPath": {"path": "/models"},
            },
        }
        self._plane.call("POST", "/api/v1/persistentvolumes", volume)
        path = f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims/models"
        until(
            "the claim is bound",
            lambda: (self._plane.call("GET", path) or {"status": {}})["status"].get("phase") == "Bound",
        )
        self.row("`models` applied once", "the claim is bound", holds=not claim.returncode)

    def _production_without_keda(self) -> None:
        applied = self.apply("overlays/production")
        until("two pods of each service", self.settled)
        missing = len(re.findall('no matches for kind "ScaledObject"', applied.stderr)) > 0
        self.row(
            "`overlays/production` without KEDA",
            "an error names ScaledObject; two pods of each service serve all the same",
            holds=bool(applied.returncode) and missing,
        )  # fmt: skip

    def _overlays(self, *, has_keda: bool) -> None:
        for overlay in ("base", *(["overlays/production"] if has_keda else []), "overlays/gpu"):
            trial = self.apply(overlay, *_TRIAL)
            applied = self.apply(overlay)
            until("two pods of each service", self.settled)
            drift = self._plane.kubectl("diff", "-k", FOLDER / overlay)
            warnings = [line for line in (trial.stderr + applied.stderr).splitlines() if "arning" in line]
            num = len(applied.stdout.splitlines())
            faults = (
                [one.stderr.strip()[:300] for one in (trial, applied) if one.returncode]
                + warnings
                + drift.stdout.splitlines()[:3]
            )
            self.row(
                f"`{overlay}`: strict, server-side, PodSecurity `restricted`",
                "; ".join(faults)[:600] or f"{num} objects accepted, no warning, no drift afterwards", holds=not faults,
            )  # fmt: skip

    def _changes(self) -> None:
        self.apply("base")
        until("two pods of each service", self.settled)
        for name in SERVICES:
            scale = {"spec": {"minReplicas": 6, "maxReplicas": 20}}
            self._plane.call(
                "PATCH", f"/apis/autoscaling/v2/namespaces/{NAMESPACE}/horizontalpodautoscalers/{name}", scale
            )
        until("six pods of each", lambda: self._num_ready() == dict.fromkeys(SERVICES, 6))
        self._nodes.watch()
        for overlay in ("overlays/gpu", "base", "overlays/production", "base"):
            self.apply(overlay)
            time.sleep(8)
        until("two pods of each service", self.settled)
        fewest = min(self._nodes.fewest.values())
        self.row(
            "base -> gpu -> base -> production -> base at six pods of each service", f"never fewer than {fewest} ready",
            holds=fewest >= 5,  # those with a GPU are replaced one by one
        )  # fmt: skip

    def _num_ready(self) -> dict[str, int]:
        ready = Counter(_app(pod) for pod in self._plane.pods() if is_ready(pod))
        return {name: ready[name] for name in SERVICES}

    def _rollouts(self) -> None:
        """With two pods of each; the autoscaler lets no more go than one a minute, so the numbers are set."""
        for name in SERVICES:
            self._plane.kubectl("-n", NAMESPACE, "scale", f"deployment/{name}", "--replicas=2")
        until("two pods of each", lambda: self._num_ready() == dict.fromkeys(SERVICES, 2) and self.settled())
        self._nodes.watch()
        together = 0
        for _ in range(self._num_rollouts):
            self._plane.kubectl("-n", NAMESPACE, "rollout", "restart", *(f"deployment/{name}" for name in SERVICES))
            for name in SERVICES:
                self._plane.kubectl("-n", NAMESPACE, "rollout", "status", f"deployment/{name}", "--timeout=120s")
            on: dict[str, set[str]] = defaultdict(set)
            for pod in self._plane.pods():
                on[_app(pod)].add(pod["spec"].get("nodeName", ""))
            together += sum(len(on[name]) < 2 for name in SERVICES)
        fewest = min(self._nodes.fewest.values())
        total = self._num_rollouts * len(SERVICES)
        self.row(
            f"{total} rollouts", f"never fewer than {fewest} ready; {together} ended with both pods on one node",
            holds=fewest >= 2 and not together,
        )  # fmt: skip

    def _drain(self) -> None:
        self._nodes.crashing = {"postprocess"}
        self._plane.kubectl(
            "-n", NAMESPACE, "delete", "pod", "-l", "app.kubernetes.io/name=postprocess", "--wait=false"
        )
        until(
            "crashing pods",
            lambda: len([p for p in self._plane.pods() if _app(p) == "postprocess" and not is_ready(p)]) >= 2,
        )
        drained = self._plane.kubectl(
            "drain", "cpu-a", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=90s"
        )
        left = [_app(pod) for pod in self._plane.pods() if pod["spec"].get("nodeName") == "cpu-a"]
        self._nodes.crashing = set()
        self._plane.kubectl("uncordon", "cpu-a")
        until("two pods of each service", self.settled)
        self.row(
            "a node drained while a service's pods crash",
            "empty" if not left else f"left: {left}",
            holds=not drained.returncode,
        )

    def _quota(self) -> None:
        quota = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "q"},
            "spec": {"hard": {"limits.cpu": "90"}},
        }
        limits = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "l"}}
        limits |= {"spec": {"limits": [{"type": "Container", "default": {"cpu": "4"}}]}}
        seen, faults = [], ""
        for kind, extra in (("resourcequotas", quota), ("limitranges", limits)):
            self._plane.call("POST", f"/api/v1/namespaces/{NAMESPACE}/{kind}", extra)
            time.sleep(2)
            dry = self._plane.kubectl(
                "-n", NAMESPACE, "create", "--dry-run=server", "-f", "-", text=json.dumps(self._a_pod())
            )
            seen.append(dry.returncode)
            faults += dry.stderr
        for kind in ("resourcequotas/q", "limitranges/l"):
            self._plane.call("DELETE", f"/api/v1/namespaces/{NAMESPACE}/{kind}")
        self.row(
            "a ResourceQuota with `limits.cpu`",
            "pods are refused, and taken with a LimitRange that gives a default" if seen == [1, 0] else faults[:600],
            holds=seen == [1, 0],
        )  # fmt: skip

    def _a_pod(self) -> Object:
        pod = next(pod for pod in self._plane.pods() if _app(pod) == "router")
        spec = {
            key: value for key, value in pod["spec"].items() if key not in ("nodeName", "topologySpreadConstraints")
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "one-more", "labels": pod["metadata"]["labels"]},
            "spec": spec,
        }

    def _policies(self) -> None:
        """Who reaches whom, by the live policies and pods; a stranger is a pod of a namespace without labels."""
        policies = self._plane.call("GET", f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies")[
            "items"
        ]
        labels = {_app(pod): pod["metadata"]["labels"] for pod in self._plane.pods()}
        inside = {"kubernetes.io/metadata.name": NAMESPACE}
        wanted = {("router", name, "grpc"): True for name in SERVICES[1:]} | {
            (name, "router", "grpc"): True for name in SERVICES[1:]
        }
        wanted |= {("prometheus", name, "metrics"): True for name in SERVICES if "prometheus" in labels}
        wanted |= {("stranger", name, "grpc"): False for name in SERVICES} | {("preprocess", "model", "grpc"): False}
        wrong = [
            f"{caller} -> {callee}:{port}"
            for (caller, callee, port), allowed in wanted.items()
            if allowed
            != _is_allowed(policies, labels.get(caller, {}), inside if caller in labels else {}, labels[callee], port)
        ]
        self.row(
            f"network policies, {len(wanted)} pairs", "as meant" if not wrong else ", ".join(wrong), holds=not wrong
        )

    def _components(self) -> None:
        alone = ("pod-monitor", "gateway-api", "kserve", "models-image", "models-from-storage", "egress")
        for names in (
            *((one,) for one in (*alone, "ranks", "inference-pool")),
            ("prefill-decode", "prefill-decode-keda"),
        ):
            trial = self._with_components(names, "--dry-run=server")
            fault = trial.stderr.strip()[:300]
            self.row(
                ", ".join(f"`components/{name}`" for name in names),
                fault or "accepted, no warning",
                holds=not trial.returncode and not fault,
            )

    def _with_components(self, names: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
        """Apply base with components."""
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            components = [f"../components/{name}" for name in names]
            text = {"resources": ["../base"], "components": components, "namespace": NAMESPACE}
            (Path(folder) / "kustomization.yaml").write_text(json.dumps(text))
            return self.apply(Path(folder).name, *options)

    def _language_models(self) -> None:
        """Ranks on several nodes, and roles: pods that get their GPUs, and who may reach whom."""
        for name, apps in (("ranks-stateful-set", ("language-model",)), ("prefill-decode", ("prefill", "decode"))):
            applied = self._with_components([name])
            until(f"the pods of {name}", partial(self._are_ready, apps, 2))
            pods = [pod for pod in self._plane.pods() if _app(pod) in apps]
            where = Counter(pod["spec"]["nodeName"] for pod in pods)
            path = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies"
            policies = self._plane.call("GET", path)["items"]
            labels = {_app(pod): pod["metadata"]["labels"] for pod in self._plane.pods()}
            inside = {"kubernetes.io/metadata.name": NAMESPACE}
            reach = {
                (caller, port): _is_allowed(policies, labels[caller], inside, labels[apps[-1]], port)
                for caller in (apps[0], "router", "preprocess")
                for port in ("grpc", "ranks")
            }
            wanted = dict.fromkeys(reach, False) | {(apps[0], "grpc"): True, ("router", "grpc"): True}
            wanted[apps[0], "ranks"] = name.startswith("ranks")
            self.row(
                f"`components/{name}` applied",
                f"{len(pods)} pods ready, on {len(where)} nodes with GPUs; network policies "
                + ("as meant" if reach == wanted else f"not as meant: {reach}"),
                holds=not applied.returncode and reach == wanted and all(node.startswith("gpu") for node in where),
            )
            kinds = "statefulset,deployment,hpa,pdb"
            self._plane.kubectl("delete", "-n", NAMESPACE, kinds, *apps, "--ignore-not-found")
            until(f"{name} is gone", lambda apps=apps: not any(_app(pod) in apps for pod in self._plane.pods()))

    def _are_ready(self, apps: Sequence[str], number: int) -> bool:
        ready = Counter(_app(pod) for pod in self._plane.pods() if is_ready(pod))
        return all(ready[app] == number for app in apps)


def _is_allowed(policies: list[Object], caller: Object, namespace: Object, callee: Object, port: str) -> bool:
    chosen = [one["spec"] for one in policies if matches(one["spec"]["podSelector"], callee)]
    rules = [rule for spec in chosen if "Ingress" in spec["policyTypes"] for rule in spec.get("ingress", [])]
    return any(
        matches(peer["namespaceSelector"], namespace) if "namespaceSelector" in peer
        else bool(namespace) and matches(peer["podSelector"], caller)
        for rule in rules if any(entry["port"] == port for entry in rule.get("ports", [{"port": port}]))
        for peer in rule["from"]
    )  # fmt: skip


@contextlib.contextmanager
def started(binaries: Path) -> Iterator[tuple[ControlPlane, Nodes]]:
    """A control plane and its nodes, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        plane = ControlPlane(binaries, Path(folder))
        stack.callback(plane.close)
        nodes = Nodes(plane)
        stack.callback(nodes.close)
        yield plane, nodes


def main() -> int:
    """Run the exam; 1 if a fact does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binaries", type=Path)
    parser.add_argument("--crds", type=Path, nargs="*", default=[])
    parser.add_argument("--rollouts", type=int, default=6, help="of all four services at once (default %(default)s)")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    with started(options.binaries) as (plane, nodes):
        version = plane.call("GET", "/version")["gitVersion"]
        exam = Exam(plane, nodes, options.rollouts)
        exam.run(options.crds)
    if options.update_docs:
        rows = "\n".join(f"| {what} | {seen} |" for what, seen, _ in exam.rows)
        table = f"Kubernetes {version}, {_now()[:10]}:\n\n| what was done | what was seen |\n|---|---|\n{rows}\n"
        before, _, rest = PAGE.read_text().partition(_BEGIN)
        PAGE.write_text(before + _BEGIN + table + _END + rest.partition(_END)[2])
    return int(not all(holds for _, _, holds in exam.rows))


if __name__ == "__main__":
    os.environ.pop("KUBECONFIG", None)
    sys.exit(main())
