"""Warm-up: each instance runs sample requests before its model is ready, so that no client pays for the first run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.base.core import CallContext, InferCall
from weft.base.errors import WeftError
from weft.base.tensors import WireTensor
from weft.serving.backends.base import Backend, Batch
from weft.serving.request.request import InferenceRequest


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """One sample request.

    Attributes:
        name: For errors.
        inputs: By name, batch dimension included.
        num_rows: Its batch size.
        num_runs: Number of runs.
    """

    name: str
    inputs: Mapping[str, WireTensor]
    num_rows: int
    num_runs: int


def warmed(backend: type[Backend], samples: Sequence[WarmupSample]) -> type[Backend]:
    """``backend`` with a ``load`` that also runs the samples; a sample that fails fails the load."""

    class WarmedBackend(backend):  # type: ignore[valid-type,misc]  # the base is a value here
        def load(self) -> None:
            super().load()
            for sample in samples:
                for _ in range(sample.num_runs):
                    self._warm(sample)

        def _warm(self, sample: WarmupSample) -> None:
            call = InferCall(self.model.signature.name, inputs=dict(sample.inputs))
            (outcome,) = self.execute(Batch([InferenceRequest(call, CallContext(), num_rows=sample.num_rows)]))
            if isinstance(outcome, WeftError):
                raise outcome.with_message(f"warm-up sample '{sample.name}' failed: {outcome.message}")

    WarmedBackend.__name__ = WarmedBackend.__qualname__ = backend.__name__
    return WarmedBackend
