"""Check of the header ``host`` where the gateway is for clients of this machine alone.

A page can have its own name resolve to 127.0.0.1 (DNS rebinding), and is then of the gateway's origin to the browser,
whose user it calls for. The name stays in the header.
"""

import ipaddress
from collections.abc import Collection

from weft.gateway.errors import RequestError

#: Allows every name.
ANY = "*"


class AllowedHosts:
    """Names by which a gateway on a loopback address may be called: addresses, ``localhost``, and those given.

    Args:
        names: Further names, or ``*``.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = {name.lower() for name in names}

    def check(self, host: str) -> None:
        """Check the value of the header, with or without a port.

        Raises:
            RequestError: It is a name that is not allowed (403).
        """
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        name = name.strip("[]").lower()
        if name in self._names or ANY in self._names or name.endswith(".localhost") or name in ("localhost", ""):
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise RequestError(
                f"the host '{name[:80]}' is not one of this gateway, which is for this machine alone; call localhost, "
                f"or start it with --allow-host {name[:80]}",
                http_status=403,
            ) from None
