"""An API server of Kubernetes with Leases alone; it answers as kube-apiserver 1.36 does."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Leases:
    """The Leases of one namespace, with the address of their server.

    Attributes:
        status: What every request is answered with; 0: as it should be.
        tokens: Of the requests.
        num_conflicts: Changes that were refused.
        rival: Called once, before the next change is looked at.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, dict[str, Any]] = {}
        self.url = ""
        self.status = 0
        self.tokens: list[str] = []
        self.num_conflicts = 0
        self.version = 100
        self.rival: Any = None
        self.lock = threading.RLock()

    def answer(self, method: str, name: str, body: Any) -> tuple[int, Any]:
        """Status and content."""
        if self.status:
            return failure(self.status, "Any", "as the test says")
        if method == "PUT" and self.rival is not None:
            rival, self.rival = self.rival, None
            rival()
        with self.lock:
            name = name or body["metadata"]["name"]
            found = self.by_name.get(name)
            if method == "POST" and found is not None:
                return failure(409, "AlreadyExists", f'leases.coordination.k8s.io "{name}" already exists')
            if method != "POST" and found is None:
                return failure(404, "NotFound", f'leases.coordination.k8s.io "{name}" not found')
            if method == "GET":
                return 200, found
            if found is not None and body["metadata"].get("resourceVersion") != found["metadata"]["resourceVersion"]:
                self.num_conflicts += 1
                return failure(409, "Conflict", "the object has been modified; please apply your changes to the latest")
            if sum(len(key) + len(value) for key, value in body["metadata"].get("annotations", {}).items()) > 1 << 18:
                return failure(422, "Invalid", "metadata.annotations: Too long: may not be more than 262144 bytes")
            self.version += 1  # of all objects, not of this one
            self.by_name[name] = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
            return 201 if method == "POST" else 200, self.by_name[name]


def failure(code: int, reason: str, message: str) -> tuple[int, Any]:
    """Status and content."""
    told = {"status": "Failure", "message": message, "reason": reason, "code": code}
    return code, {"kind": "Status", "apiVersion": "v1", "metadata": {}, **told}


@contextmanager
def serving_leases() -> Iterator[Leases]:
    """A server on loopback; it has ended with the block."""
    leases = Leases()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            leases.tokens.append(self.headers.get("Authorization", ""))
            path, _, name = self.path.partition("/namespaces/weft/leases")
            assert path == "/apis/coordination.k8s.io/v1"
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
            status, content = leases.answer(self.command, name.removeprefix("/"), body)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = answer  # noqa: N815  # names of http.server

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        leases.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield leases
        finally:
            server.shutdown()
            thread.join()
