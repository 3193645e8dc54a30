"""Several hosts on one machine: network namespaces on one bridge, whose links can be cut and restored.

Everything is inside a user namespace and a network namespace of its own: it needs no root, touches no interface of the
machine, and is gone with its processes.
"""

import shutil
import subprocess
from collections.abc import Sequence

#: Network of the hosts; host n has the address n.
_NETWORK = "10.77.0"


def why_impossible() -> str:
    """Why this machine cannot have such hosts; "" if it can."""
    missing = [program for program in ("ip", "unshare", "nsenter") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    probe = ["unshare", "--user", "--map-root-user", "--net", "ip", "link", "add", "probe", "type", "bridge"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no network namespaces: {done.stderr.strip()}"


class Hosts:
    """Hosts by number, 1 to 250; they are there until ``close``.

    Args:
        numbers: Of the hosts.
    """

    def __init__(self, *numbers: int) -> None:
        self._holders: list[subprocess.Popen[str]] = []
        self._pids: dict[int, int] = {}
        try:
            self._make(numbers)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def address(number: int) -> str:
        """IPv4 address of a host."""
        return f"{_NETWORK}.{number}"

    def command(self, number: int, command: Sequence[str]) -> list[str]:
        """A command line that runs ``command`` on a host."""
        return [*_enter(self._pids[number]), *command]

    def cut(self, number: int) -> None:
        """From now on nothing that is sent to or from the host arrives; neither side is told."""
        self._on(self._switch, "ip", "link", "set", f"port{number}", "nomaster")

    def restore(self, number: int) -> None:
        """The link of the host works again."""
        self._on(self._switch, "ip", "link", "set", f"port{number}", "master", "bridge")

    def close(self) -> None:
        """The namespaces are gone; what runs on the hosts has to be ended before."""
        for holder in reversed(self._holders):
            holder.kill()
            holder.wait()
            for pipe in (holder.stdin, holder.stdout):
                if pipe is not None:
                    pipe.close()

    def _make(self, numbers: Sequence[int]) -> None:
        self._switch = self._hold(["unshare", "--user", "--map-root-user", "--net"])
        self._on(self._switch, "ip", "link", "add", "bridge", "type", "bridge")
        self._on(self._switch, "ip", "link", "set", "bridge", "up")
        for number in numbers:
            self._pids[number] = pid = self._hold([*_enter(self._switch), "unshare", "--net"])
            port = ["ip", "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", str(pid)]
            self._on(self._switch, *port)
            self._on(self._switch, "ip", "link", "set", f"port{number}", "master", "bridge", "up")
            self._on(pid, "ip", "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                self._on(pid, "ip", "link", "set", link, "up")

    def _hold(self, unshare: Sequence[str]) -> int:
        """Pid of a process that keeps new namespaces alive."""
        holder = subprocess.Popen(
            [*unshare, "sh", "-c", "echo $$; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        return int(holder.stdout.readline())

    @staticmethod
    def _on(pid: int, *command: str) -> None:
        subprocess.run([*_enter(pid), *command], check=True, capture_output=True, text=True)


def _enter(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--user", "--preserve-credentials", "--net"]
