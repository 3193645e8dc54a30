"""A folder for a model and its context, and spans that are kept."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Sampler
from tests.unit.builders import MakeModelContext, model_context

from weft.base.observing import telemetry


@pytest.fixture
def version_folder(tmp_path: Path) -> Path:
    """An empty version folder ``<model>/1``."""
    folder = tmp_path / "model" / "1"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def make_model_context(version_folder: Path) -> MakeModelContext:
    """Makes the context of a model in ``version_folder``."""
    return functools.partial(model_context, directory=version_folder)


@pytest.fixture
def sampler() -> Sampler:
    """Which spans ``exporter`` gets: all, unless a file of tests says otherwise."""
    return DEFAULT_ON


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch, sampler: Sampler) -> Iterator[InMemorySpanExporter]:
    """Telemetry is on; spans that ended are kept in memory."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry._state, "provider", provider)
    monkeypatch.setattr(telemetry._state, "tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()
