"""Reads the metrics pages of services."""

import http.client
import ssl
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.parser import text_string_to_metric_families

#: How long one page may take, in seconds.
TIMEOUT_S = 2.0
_MAX_PAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Page:
    """The metrics page of one service.

    Attributes:
        at_s: Time of the reading, on ``time.monotonic``.
        samples: By name: labels and value of each.
        error: Why there are none; "" if there are.
    """

    at_s: float
    samples: Mapping[str, Sequence[tuple[Mapping[str, str], float]]] = field(default_factory=dict)
    error: str = ""

    def values(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """Samples of a name that have these labels, and perhaps others."""
        for given, value in self.samples.get(name, ()):
            if labels.items() <= given.items():
                yield given, value

    def value(self, name: str, **labels: str) -> float:
        """Sum of these samples; 0 where there is none."""
        return sum(value for _, value in self.values(name, **labels))


def url_of(address: str) -> str:
    """The metrics page at ``host:port``; a URL is left as it is."""
    return address if "://" in address else f"http://{address}/metrics"


def scrape(addresses: Mapping[str, str], tls: ssl.SSLContext | None = None) -> dict[str, Page]:
    """The pages of all services, fetched at once, https with ``tls``; one that does not answer has an error."""
    with ThreadPoolExecutor(max_workers=max(len(addresses), 1)) as pool:
        return dict(zip(addresses, pool.map(partial(_page, tls=tls), addresses.values()), strict=True))


def _page(address: str, tls: ssl.SSLContext | None) -> Page:
    try:
        url = url_of(address)
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=tls) as response:  # noqa: S310  # the user's own
            text = response.read(_MAX_PAGE_BYTES).decode(errors="replace")
        samples: defaultdict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # The parser adds the suffix to counters that have none, as those of Triton Inference Server.
                name = sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name
                samples[name].append((sample.labels, sample.value))
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        return Page(time.monotonic(), error=getattr(reason, "strerror", None) or str(reason) or type(error).__name__)
    return Page(time.monotonic(), samples)
