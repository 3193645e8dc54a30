import asyncio

import bentoml
import numpy as np
from models.bentoml_models import Decode, DigitsCnn, DigitsForest, DigitsTiny


@bentoml.service
class Vote:
    decode = bentoml.depends(Decode)
    cnn = bentoml.depends(DigitsCnn)
    forest = bentoml.depends(DigitsForest)
    tiny = bentoml.depends(DigitsTiny)

    @bentoml.api
    async def infer(self, images: list[str]) -> dict[str, np.ndarray]:
        pixels = await self.decode.to_async.decode(images)
        voters = [(3.0, self.cnn), (2.0, self.forest), (2.0, self.tiny)]
        asked = [asyncio.ensure_future(self.ask(*voter, pixels)) for voter in voters]
        pending, votes = set(asked), []
        while pending and len(votes) < 2:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            votes += [one.result() for one in done if not one.exception()]
        if len(votes) < 2:
            raise RuntimeError(f"{len(votes)} of {len(asked)} models answered; 2 are needed")
        if pending:
            done, pending = await asyncio.wait(pending, timeout=0.2)
            votes += [one.result() for one in done if not one.exception()]
        for late in pending:
            late.cancel()
        return {"LABEL": sum(votes).argmax(axis=1)[:, None]}

    async def ask(self, weight: float, model, pixels: np.ndarray) -> np.ndarray:
        return weight * np.eye(10)[(await model.to_async.classify(pixels))["LABEL"][:, 0]]
