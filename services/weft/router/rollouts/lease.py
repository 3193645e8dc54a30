"""Shared state of rollouts in a Lease of Kubernetes: for routers that share no file system."""

import contextlib
import json
import os
import ssl
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from weft.base.observing.logs import get_logger
from weft.router.rollouts.shared import Document, Json, Ownership

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_STATE, _DAMAGED = "weft.dev/rollouts", "weft.dev/rollouts-damaged"
_TIMEOUT_S = 5.0
#: A longer document leaves out what it can, and is compressed to about a third; Kubernetes takes 256 KiB.
_MAX_CHARS = 1 << 17
#: How often one change is tried while others change the Lease, too.
_MAX_TRIES = 20

_log = get_logger("weft.router.rollouts")


class LeaseState:
    """A Lease that the owner holds and renews, as client-go does it, with the document in an annotation.

    Each change is a compare-and-set on ``resourceVersion``: an owner that lost the Lease changes nothing.

    Args:
        url: Of the API server, for example of a ``kubectl proxy``; "": of the cluster in which this process runs.
        account: Folder with ``token``, which is read for each call, and ``ca.crt``.
    """

    def __init__(
        self, namespace: str, name: str, ownership: Ownership, *, url: str = "", account: Path = _ACCOUNT
    ) -> None:
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
        self._all = url or f"https://{f'[{host}]' if ':' in host else host}:{port}"
        self._all += f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self.member, self.period_s = ownership.member, 2.0
        self._name, self._account, self._ownership = name, account, ownership

    def change(self, edit: Callable[[Document], bool]) -> Document:
        """Change the annotation; the owner renews the Lease with it."""
        for _ in range(_MAX_TRIES):
            lease = self._lease()
            is_owner = self._ownership.hold(lease["spec"])
            document = self._document(lease)
            document.owner = lease["spec"]["holderIdentity"]
            if is_changed := edit(document):
                if len(text := document.text) > _MAX_CHARS:
                    document.drop_counts()
                    text = b64encode(zlib.compress(document.text.encode())).decode()
                lease["metadata"].setdefault("annotations", {})[_STATE] = text
            if not (is_changed or is_owner) or self._call("PUT", lease, unless=409):
                return document
        raise OSError(f"Lease {self._name} is changed too often by others")

    def close(self) -> None:
        """Release the Lease, so that the next owner need not wait until it has run out."""
        with contextlib.suppress(OSError):
            lease = self._lease()
            if self._ownership.release(lease["spec"]):
                self._call("PUT", lease)

    def _call(self, method: str, body: Json = None, *, unless: int = 0) -> Json:
        """The response; None if its status is ``unless``. Raises OSError."""
        tls, headers = None, {"Content-Type": "application/json"}
        if (token := self._account / "token").exists():
            headers["Authorization"] = f"Bearer {token.read_text().strip()}"
            tls = ssl.create_default_context(cafile=self._account / "ca.crt") if self._all[:5] == "https" else None
        url = self._all if method == "POST" else f"{self._all}/{self._name}"
        request = Request(url, body and json.dumps(body).encode(), headers, method=method)  # noqa: S310  # as given
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=tls))
        try:
            with opener.open(request, timeout=_TIMEOUT_S) as response:
                return json.load(response)
        except HTTPError as error:
            if error.code == unless:
                return None
            raise OSError(f"{url}: {error}: {error.read(300).decode(errors='replace')}") from error
        except (HTTPException, ValueError) as error:
            raise OSError(f"{url} does not answer as an API server: {error!r}") from error

    def _lease(self) -> Json:
        """The Lease, made if there is none."""
        new = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}, "spec": {}}
        return self._call("GET", unless=404) or self._call("POST", new, unless=409) or self._call("GET")

    def _document(self, lease: Json) -> Document:
        annotations = lease["metadata"].get("annotations", {})
        try:
            text = annotations.get(_STATE, Document().text)
            return Document.parse(text if text[:1] in "{[" else zlib.decompress(b64decode(text)))
        except (ValueError, zlib.error) as error:
            annotations[_DAMAGED] = annotations.pop(_STATE)[:_MAX_CHARS]
            _log.error("%s of Lease %s is damaged and is kept as %s: %s", _STATE, self._name, _DAMAGED, error)
            return Document()
