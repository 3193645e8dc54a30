"""Where the shared state of rollouts is: ``--rollouts``."""

import os
import re
from pathlib import Path

#: Namespace, name, and the address of an API server in place of the cluster's own.
LEASE = re.compile(r"lease:([a-z0-9-]+)/([a-z0-9-]+)(?:@(https?://.+))?")


def place_of(where: str, repository: Path, state_dir: Path | None) -> str:
    """The value of ``--rollouts``, or what it means if it is not given: a folder, ``LEASE`` or "off"."""
    if where:
        return where
    if os.access(repository, os.W_OK):
        return str(repository / ".weft" / "rollouts")
    return "off" if state_dir is None else str(state_dir / "rollouts")
