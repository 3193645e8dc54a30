"""One version of a model, and its state in the index."""

from dataclasses import dataclass
from enum import StrEnum

from weft.serving.lifecycle.on_demand import OnDemandModel
from weft.serving.lifecycle.response_cache import CachedModel
from weft.serving.runtime.model import ServedModel
from weft_protos.model_config_pb2 import ModelConfig

#: Answers the requests of a version.
Served = ServedModel | OnDemandModel | CachedModel


class VersionState(StrEnum):
    """States of ``RepositoryIndex``."""

    UNKNOWN = ""
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True, eq=False)
class ModelVersion:
    """One version of a model, its state, and the reason where it does not serve."""

    number: int
    config: ModelConfig
    served: Served
    state: VersionState = VersionState.LOADING
    reason: str = ""

    @property
    def shown_state(self) -> VersionState:
        """The state that clients see: for a version that has lost every instance UNAVAILABLE, or LOADING."""
        outages = self.served.outages
        if self.state is not VersionState.READY or not outages.is_total:
            return self.state
        return VersionState.LOADING if outages.is_loading else VersionState.UNAVAILABLE
