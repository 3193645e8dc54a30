"""Shared state of rollouts in a Lease of Kubernetes: for routers that share no file system."""

import contextlib
import http.client
import json
import os
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from weft.base.observing.logs import get_logger
from weft.router.rollouts.shared import Document, Json

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_STATE, _DAMAGED = "weft.dev/rollouts", "weft.dev/rollouts-damaged"
_TIMEOUT_S = 5.0
#: How often one change is tried while others change the Lease, too.
_MAX_TRIES = 20
_ERRORS = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError, 409: FileExistsError}

_log = get_logger("weft.router.rollouts")


class KubernetesApi:
    """Calls the API server, from any thread.

    Args:
        url: Of a ``kubectl proxy``, say; "": of the cluster in which this process runs.
        account: Folder with ``token``, which is read anew for each call, and ``ca.crt``.
    """

    def __init__(self, url: str = "", account: Path = _ACCOUNT) -> None:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        self._url = urlsplit(url or f"https://{f'[{host}]' if ':' in host else host}:{port}")
        self._account = account

    def call(self, method: str, path: str, body: Json = None) -> Json:
        """The response. Raises OSError; FileNotFoundError is a status 404, FileExistsError 409."""
        headers = {"Content-Type": "application/json"}
        if (token := self._account / "token").exists():
            headers["Authorization"] = f"Bearer {token.read_text().strip()}"
        if self._url.scheme == "https":
            tls = ssl.create_default_context(cafile=self._account / "ca.crt")
            made: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._url.netloc, timeout=_TIMEOUT_S, context=tls
            )
        else:
            made = http.client.HTTPConnection(self._url.netloc, timeout=_TIMEOUT_S)
        try:
            with contextlib.closing(made) as connection:
                connection.request(method, path, json.dumps(body), headers)
                response = connection.getresponse()
                content = response.read()
                if response.status < 400:
                    return json.loads(content)
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"{self._url.netloc} does not answer as an API server: {error!r}") from error
        text = f"{method} {path}: status {response.status}: {content[:300].decode(errors='replace')}"
        raise _ERRORS.get(response.status, OSError)(text)


class LeaseState:
    """A Lease that the owner holds and renews, as client-go does it, with the document in an annotation.

    Each change is a compare-and-set on ``resourceVersion``: an owner that lost the Lease changes nothing. It runs out
    ``duration_s`` after this process saw its last renewal, so clocks may differ.

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
        self._seen: Json = None
        self._seen_at_s = 0.0

    def change(self, edit: Callable[[Document], bool]) -> Document:
        """Change the annotation; the owner renews the Lease with it."""
        for _ in range(_MAX_TRIES):
            lease = self._lease()
            is_owner = self._hold(lease["spec"])
            document = self._document(lease)
            document.owner = lease["spec"]["holderIdentity"]
            is_changed = edit(document)
            if is_changed:
                lease["metadata"].setdefault("annotations", {})[_STATE] = document.text
            if not (is_changed or is_owner):
                return document
            with contextlib.suppress(FileExistsError):  # a conflict: once more, with the newer one
                self._api.call("PUT", f"{self._path}/{self._name}", lease)
                return document
        raise OSError(f"Lease {self._name} is changed too often by others")

    def close(self) -> None:
        """Release the Lease, so that the next owner need not wait until it has run out."""
        with contextlib.suppress(OSError):
            lease = self._lease()
            if lease["spec"].get("holderIdentity") == self.member:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                self._api.call("PUT", f"{self._path}/{self._name}", lease)

    def _lease(self) -> Json:
        """The Lease, made if there is none."""
        try:
            return self._api.call("GET", f"{self._path}/{self._name}")
        except FileNotFoundError:
            new = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name},
                "spec": {},
            }
            with contextlib.suppress(FileExistsError):
                return self._api.call("POST", self._path, new)
            return self._api.call("GET", f"{self._path}/{self._name}")

    def _hold(self, spec: Json) -> bool:
        """Take the Lease if it is free or has run out, renew it if it is this member's; False if it is another's."""
        if spec != self._seen:
            self._seen, self._seen_at_s = dict(spec), self._clock_s()
        holder, now = spec.get("holderIdentity"), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if holder != self.member:
            if holder and self._seen_at_s + spec.get("leaseDurationSeconds", 0) > self._clock_s():
                return False
            spec |= {"leaseTransitions": spec.get("leaseTransitions", -1) + 1, "acquireTime": now}
        spec |= {"holderIdentity": self.member, "leaseDurationSeconds": self._duration_s, "renewTime": now}
        return True

    def _document(self, lease: Json) -> Document:
        annotations = lease["metadata"].get("annotations", {})
        try:
            return Document.parse(annotations[_STATE]) if _STATE in annotations else Document()
        except ValueError as error:
            annotations[_DAMAGED] = annotations.pop(_STATE)
            _log.error("%s of Lease %s is damaged and is kept as %s: %s", _STATE, self._name, _DAMAGED, error)
            return Document()
