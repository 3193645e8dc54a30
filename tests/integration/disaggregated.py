"""Model services with roles, and a router over them."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.integration.language_model import Service, write_model
from tests.integration.routing import running_router
from tests.ports import free_port
from tests.processes import Running, scrape, wait_until

KEY = "the-key-of-this-mesh"
MODEL = "text"


class Replica:
    """A model service with a role, on fixed ports, which may be started again."""

    def __init__(
        self, root: Path, folder: Path, role: str, key_file: Path, *, is_local: bool, **parameters: object
    ) -> None:
        self.role = role
        repository = root / role
        repository.mkdir()
        write_model(repository, MODEL, folder, role=role, prefill_min_tokens=32, max_num_seqs=8, **parameters)
        port, self._metrics = free_port(), free_port()
        socket = root / f"{role}.sock"
        self.grpc = f"127.0.0.1:{port}"
        self.address = f"unix:{socket}" if is_local else self.grpc
        self._command = [
            sys.executable, "-P", "-m", "weft.services.model", "--repository", str(repository),
            "--grpc-port", str(port), "--metrics-port", str(self._metrics), "--stop-with-stdin",
            "--mesh-key-file", str(key_file), *(["--unix-socket", str(socket)] if is_local else []),
        ]  # fmt: skip
        self.process: subprocess.Popen[str] | None = None

    def begin(self) -> None:
        """The process runs; it need not serve yet."""
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
        )

    def serve(self) -> None:
        """It serves."""
        assert self.process is not None
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), "the service ended before it served"

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """The process has ended by a signal."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(30)
            self.process.communicate()
            self.process = None

    def figure(self, name: str, **labels: str) -> float:
        """The sum of the samples of a metric of the engine with these labels."""
        samples = scrape(f"127.0.0.1:{self._metrics}")
        wanted = [f'{label}="{text}"' for label, text in labels.items()]
        return sum(
            value
            for key, value in samples.items()
            if key.startswith(f"weft_llm_{name}{{") and all(each in key for each in wanted)
        )

    def is_clean(self) -> bool:
        """No block has an owner, and no lease is open."""
        return not any(self.figure(name) for name in ("kv_leases", "kv_cache_usage_ratio", "running", "waiting"))


class Disaggregated(NamedTuple):
    """A mesh whose prompts are computed apart."""

    router: Service
    prefill: Replica
    decode: Replica
    both: Replica

    def check_clean(self) -> None:
        """Nothing is held any more where a process runs."""
        for replica in (self.prefill, self.decode, self.both):
            if replica.process is not None:
                wait_until(replica.is_clean, f"the end of all leases of {replica.role}")


@contextmanager
def disaggregated(
    root: Path,
    folder: Path,
    *,
    is_local: bool = True,
    roles: tuple[str, ...] = ("prefill", "decode"),
    **parameters: object,
) -> Iterator[Disaggregated]:
    """A router over replicas with these roles; ``both`` is a service apart, which the router does not know."""
    key_file = root / "key"
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    (root / "graphs").mkdir()
    prefill, decode, both = (
        Replica(root, folder, role, key_file, is_local=is_local, **parameters) for role in ("prefill", "decode", "both")
    )
    known = [one for one in (prefill, decode, both) if one.role in roles]
    with ExitStack() as stack:
        for replica in {prefill, decode, both}:
            stack.callback(replica.end)
            replica.begin()
        for replica in (prefill, decode, both):
            replica.serve()
        address = ",".join(one.address for one in known)
        router: Running = stack.enter_context(
            running_router(root / "graphs", address, ("--mesh-key-file", str(key_file)))
        )
        service = Service(router.process, {"grpc": router.grpc, "metrics": router.metrics})
        yield Disaggregated(service, prefill, decode, both)
