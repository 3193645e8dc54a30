"""Metrics of the models of other services, on a page of one's own: ``--metrics-from``."""

import argparse
import http.client
import re
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from weft.base.observing.logs import get_logger
from weft.base.text.argument_types import add, argument

#: Time that a service has for its page, in seconds.
FETCH_TIMEOUT_S = 1.0
#: A page that is larger is left out, in bytes.
MAX_PAGE_BYTES = 8 << 20
_LABEL = "service"
#: Lines of families that a service has whatever its models do; who republishes has its own.
_OWN_LINES = re.compile(r"^(?:# (?:HELP|TYPE) )?(?:nv_|weft_|process_|python_).*\n?", re.MULTILINE)

_log = get_logger("weft.metrics")


class MetricsSource(NamedTuple):
    """Address of a service's metrics."""

    url: str
    service: str = ""

    @classmethod
    def parse(cls, text: str) -> "MetricsSource":
        """Parse ``[NAME=]URL``. Raises ValueError."""
        name, separator, url = text.partition("=")
        if not separator or "://" in name:
            name, url = "", text
        address = url.removeprefix("http://")
        if address == url or not address.partition("/")[0] or not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError(f"'{text}' must be [NAME=]URL, for example http://127.0.0.1:8022/metrics")
        return cls(url, name)

    @property
    def text(self) -> str:
        """The form that ``parse`` takes."""
        return f"{self.service}={self.url}" if self.service else self.url


def add_metrics_from_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--metrics-from``, any number of times."""
    text = (
        "page of a service's metrics, for example http://127.0.0.1:8022/metrics: those that its models have registered "
        'are on this page too, with the label service="NAME" if there is one; may be repeated'
    )
    add(parser, "--metrics-from [NAME=]URL ...", text, argument(MetricsSource.parse))


class ModelMetricsCollector(Collector):
    """Republishes the metrics that models of other services have registered, not the services' own.

    A service that does not answer in time is left out. If two services have the same series, or a family with different
    types, the first counts; a service with a name has series of its own.
    """

    def __init__(self, sources: Sequence[MetricsSource]) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self._pages = [""] * len(self._sources)
        # Without proxies of the environment.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def collect(self) -> Iterator[Metric]:
        """Every family of every service."""
        families: dict[str, Metric] = {}
        seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        for source, page in zip(self._sources, self._read(), strict=True):
            for found in _families_of(source, page):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                if family.type != found.type:
                    continue
                for sample in found.samples:
                    labelled = _labelled(sample, source.service)
                    key = labelled.name, frozenset(labelled.labels.items())
                    if key not in seen:
                        seen.add(key)
                        family.samples.append(labelled)
        yield from families.values()

    def _read(self) -> list[str]:
        """Read the pages, in order; "" for one that is left out."""
        # A router that is told to ask itself must not ask for ever: what waits so long has the pages of another scrape.
        if self._sources and self._lock.acquire(timeout=FETCH_TIMEOUT_S / 2):
            try:
                with ThreadPoolExecutor(len(self._sources)) as threads:
                    self._pages = list(threads.map(self._page_of, self._sources))
            finally:
                self._lock.release()
        return self._pages

    def _page_of(self, source: MetricsSource) -> str:
        end_s = time.monotonic() + FETCH_TIMEOUT_S
        page = bytearray()
        try:
            with self._opener.open(source.url, timeout=FETCH_TIMEOUT_S) as answer:
                while part := answer.read1(1 << 16):
                    page += part
                    if len(page) > MAX_PAGE_BYTES or time.monotonic() > end_s:
                        raise TimeoutError(f"{len(page)} bytes in {FETCH_TIMEOUT_S:g} s, and more to come")
            return page.decode()
        except (OSError, ValueError, http.client.HTTPException) as error:
            _log.debug("no metrics of models from %s: %s", source.url, error)
            return ""


def _families_of(source: MetricsSource, page: str) -> list[Metric]:
    text = _OWN_LINES.sub("", page)
    try:
        return [_as_named(family, text) for family in text_string_to_metric_families(text)]
    except (ValueError, KeyError, IndexError) as error:
        _log.debug("the metrics of %s cannot be read: %s", source.url, error)
        return []


def _as_named(family: Metric, page: str) -> Metric:
    """The family under its page's name: the parser adds ``_total`` to counters without it.

    Such a counter gets no type here, like the services' own; the page says ``counter``.
    """
    if family.type != "counter" or f"# TYPE {family.name}_total counter" in page:
        return family
    named = Metric(family.name, family.documentation, "unknown")
    named.samples = [sample._replace(name=sample.name.removesuffix("_total")) for sample in family.samples]
    return named


def _labelled(sample: Sample, service: str) -> Sample:
    if not service:
        return sample
    labels = dict(sample.labels)
    if _LABEL in labels:
        labels[f"exported_{_LABEL}"] = labels.pop(_LABEL)  # as Prometheus does where its own labels are in the way
    return sample._replace(labels=labels | {_LABEL: service})
