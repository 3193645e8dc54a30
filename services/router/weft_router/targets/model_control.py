"""Loads and unloads of models, at the targets that have them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from weft_common.core import ParameterValue
from weft_common.errors import NotFoundError, WeftError
from weft_router.target import ControlledTarget, Target
from weft_router.targets.catalog import TargetCatalog


class TargetControl:
    """Passes loads and unloads on to the target that serves a model, or of an unknown model to the first that has it.

    Args:
        targets: In the order of the command line.
        catalog: Knows which target serves a model, and is told of changes.
    """

    def __init__(self, targets: Sequence[Target], catalog: TargetCatalog) -> None:
        self._targets = [target for target in targets if isinstance(target, ControlledTarget)]
        self._catalog = catalog

    async def load(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> bool:
        """Load or reload a model, so that it is known what its target serves then; False: no target has it.

        Raises:
            WeftError: What the target says.
        """
        return await self._change(name, lambda target: target.load(name, parameters))

    async def unload(self, name: str, *, unload_dependents: bool) -> bool:
        """Unload a model; False: no target has it. Raises as ``load``."""
        return await self._change(name, lambda target: target.unload(name, unload_dependents=unload_dependents))

    async def _change(self, name: str, change: Callable[[ControlledTarget], Awaitable[None]]) -> bool:
        entry = self._catalog.entry(name, "")
        for target in self._targets:
            if entry is not None and target.name != entry.target:
                continue
            try:
                await change(target)
            except WeftError as error:
                if error.code != NotFoundError.code:
                    raise
            else:
                await self._catalog.refresh(target.name)
                return True
        return False
