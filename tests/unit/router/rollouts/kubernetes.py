"""An API server of Kubernetes with Leases alone, which takes a change of the version that it has and no other."""

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
        self.rival: Any = None
        self.lock = threading.RLock()

    def answer(self, method: str, name: str, body: Any) -> tuple[int, Any]:
        """Status and content."""
        if self.status:
            return self.status, {"kind": "Status", "message": "as the test says"}
        if method == "PUT" and self.rival is not None:
            rival, self.rival = self.rival, None
            rival()
        with self.lock:
            found = self.by_name.get(name)
            if method == "POST":
                if body["metadata"]["name"] in self.by_name:
                    return 409, {"reason": "AlreadyExists"}
                found = self.by_name[body["metadata"]["name"]] = body
                found["metadata"]["resourceVersion"] = "1"
            elif found is None:
                return 404, {"reason": "NotFound"}
            elif method == "PUT":
                version = found["metadata"]["resourceVersion"]
                if body["metadata"].get("resourceVersion") != version:
                    self.num_conflicts += 1
                    return 409, {"reason": "Conflict"}
                found = self.by_name[name] = body
                found["metadata"]["resourceVersion"] = str(int(version) + 1)
            return 200, found


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
