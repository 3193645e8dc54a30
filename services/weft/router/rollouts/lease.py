"""Shared state of rollouts in Kubernetes Leases: for routers that share no file system."""

import contextlib
import http.client
import json
import os
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from weft.base.observing.logs import get_logger
from weft.router.rollouts.shared import Document, Json, parsed

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_KIND = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
_STATE, _DAMAGED, _COUNTS, _LABEL = "weft.dev/state", "weft.dev/damaged", "weft.dev/counts", "weft.dev/rollouts"
_TIMEOUT_S = 5.0
_MAX_CONFLICTS = 20

_log = get_logger("weft.router.rollouts")


class KubernetesApi:
    """The API server, asked from any thread.

    Args:
        url: ``http://host:port`` of ``kubectl proxy``, say; "": that of the cluster which this process runs in.
        account: Folder with ``token`` and ``ca.crt``; the token is read for each request, because it changes.
    """

    def __init__(self, url: str = "", account: Path = _ACCOUNT) -> None:
        if not url:
            host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
            url = f"https://{f'[{host}]' if ':' in host else host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
        self._url = urlsplit(url)
        self._account = account

    def call(self, method: str, path: str, body: Json = None) -> Any:
        """The response's JSON.

        Raises OSError: FileNotFoundError for a 404, FileExistsError for a 409, PermissionError for a 401 or 403.
        """
        address, headers = self._url.netloc, {"Content-Type": "application/json"}
        if method == "PATCH":
            headers["Content-Type"] = "application/merge-patch+json"
        if (token := self._account / "token").exists():
            headers["Authorization"] = f"Bearer {token.read_text().strip()}"
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        if self._url.scheme == "https":
            context = ssl.create_default_context(cafile=self._account / "ca.crt")
            connection = http.client.HTTPSConnection(address, timeout=_TIMEOUT_S, context=context)
        try:
            with contextlib.closing(connection):
                connection.request(method, self._url.path.rstrip("/") + path, json.dumps(body), headers)
                response = connection.getresponse()
                content = response.read()
                if response.status < 400:
                    return json.loads(content)
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"{address} does not answer as the API server of Kubernetes: {error!r}") from error
        kinds = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError, 409: FileExistsError}
        reason = content[:300].decode(errors="replace")
        raise kinds.get(response.status, OSError)(f"{method} {path}: status {response.status}: {reason}")


class LeaseState:
    """A Lease that has the owner, renewed as client-go does it, and the document in an annotation; one a member.

    Every change of the document is a compare-and-set on the Lease's ``resourceVersion``, so an owner that lost the Lease
    changes nothing. Whether a Lease has run out is measured from when this process saw its last change, by its own
    clock: clocks may differ.

    Source:
        https://pkg.go.dev/k8s.io/client-go/tools/leaderelection
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        name: str,
        member: str,
        *,
        duration_s: int = 15,
        period_s: float = 2.0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.member, self.period_s = member, period_s
        self._api, self._name, self._duration_s, self._clock_s = api, name, duration_s, clock_s
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._observed: Json = None
        self._observed_at_s = 0.0

    def own(self) -> str:
        """Take the Lease if it is free or has run out; renew it if this member has it."""
        lease = self._lease()
        spec = lease["spec"]
        owner: str = self._owner_of(lease)
        if owner and owner != self.member:
            return owner
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if not owner:
            spec["leaseTransitions"] = spec.get("leaseTransitions", 0) + 1
            spec["acquireTime"] = now
        spec |= {"holderIdentity": self.member, "leaseDurationSeconds": self._duration_s, "renewTime": now}
        try:
            self._observe(self._put(lease))
        except FileExistsError:  # another member was faster
            return self._owner_of(self._lease())
        return self.member

    def read(self) -> Document:
        """Like ``SharedState.read``."""
        with contextlib.suppress(FileNotFoundError):
            return self._document(self._api.call("GET", f"{self._path}/{self._name}"))
        return Document()

    def change(self, edit: Callable[[Document], bool]) -> Document:
        """Change the annotation, again on the newer document after a conflict."""
        for _ in range(_MAX_CONFLICTS):
            lease = self._lease()
            document = self._document(lease)
            if not edit(document):
                return document
            lease["metadata"].setdefault("annotations", {})[_STATE] = document.text
            with contextlib.suppress(FileExistsError):
                self._put(lease)
                return document
        raise OSError(f"Lease {self._name} changes too often")

    def tell(self, counts: Json) -> None:
        """Replace the annotation of this member's own Lease."""
        name = f"{self._name}-{self.member}"
        change = {"metadata": {"annotations": {_COUNTS: json.dumps(counts)}}}
        try:
            self._api.call("PATCH", f"{self._path}/{name}", change)
        except FileNotFoundError:
            metadata = {**change["metadata"], "name": name, "labels": {_LABEL: self._name}}
            self._api.call("POST", self._path, {**_KIND, "metadata": metadata, "spec": {}})

    def counts(self) -> Mapping[str, Json]:
        """The annotations of all members' Leases."""
        leases = self._api.call("GET", f"{self._path}?labelSelector={_LABEL}%3D{self._name}")["items"]
        found = {}
        for metadata in (lease["metadata"] for lease in leases):
            with contextlib.suppress(KeyError, ValueError):
                found[metadata["name"].removeprefix(f"{self._name}-")] = json.loads(metadata["annotations"][_COUNTS])
        return found

    def drop(self, members: Iterable[str]) -> None:
        """Delete their Leases."""
        for member in members:
            with contextlib.suppress(FileNotFoundError):
                self._api.call("DELETE", f"{self._path}/{self._name}-{member}")

    def close(self) -> None:
        """Release the Lease, so that the next owner need not wait until it runs out."""
        with contextlib.suppress(OSError):
            lease = self._api.call("GET", f"{self._path}/{self._name}")
            if lease["spec"].get("holderIdentity") == self.member:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                self._put(lease)

    def _lease(self) -> Json:
        """The Lease, made if there is none."""
        try:
            return self._api.call("GET", f"{self._path}/{self._name}")
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                self._api.call("POST", self._path, {**_KIND, "metadata": {"name": self._name}, "spec": {}})
            return self._api.call("GET", f"{self._path}/{self._name}")

    def _put(self, lease: Json) -> Json:
        return self._api.call("PUT", f"{self._path}/{self._name}", lease)

    def _observe(self, lease: Json) -> None:
        if lease["spec"] != self._observed:
            self._observed, self._observed_at_s = lease["spec"], self._clock_s()

    def _owner_of(self, lease: Json) -> str:
        """Name of the owner; "" if there is none, or its Lease has run out."""
        self._observe(lease)
        owner: str = lease["spec"].get("holderIdentity") or ""
        lasts_s = lease["spec"].get("leaseDurationSeconds") or 0
        return owner if owner == self.member or self._observed_at_s + lasts_s > self._clock_s() else ""

    def _document(self, lease: Json) -> Document:
        annotations = lease["metadata"].setdefault("annotations", {})
        document = Document(owner=self._owner_of(lease))
        if text := annotations.get(_STATE):
            try:
                document.rollouts = parsed(text)
            except (ValueError, RecursionError) as error:
                annotations[_DAMAGED] = annotations.pop(_STATE)
                _log.error("annotation %s of Lease %s is damaged and is kept as %s: %s", _STATE, self._name, _DAMAGED, error)
        return document
