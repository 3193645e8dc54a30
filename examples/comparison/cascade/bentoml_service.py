import contextlib

import bentoml
import numpy as np
from models.bentoml_models import Decode, DigitsCommittee, DigitsTiny


@bentoml.service
class Cascade:
    decode = bentoml.depends(Decode)
    small = bentoml.depends(DigitsTiny)
    large = bentoml.depends(DigitsCommittee)

    @bentoml.api
    async def infer(self, images: list[str]) -> dict[str, np.ndarray]:
        pixels = await self.decode.to_async.decode(images)
        found = await self.small.to_async.classify(pixels)
        label, unsure = np.array(found["LABEL"]), found["PROBS"].max(axis=1) < 0.8
        if unsure.any():
            with contextlib.suppress(Exception):  # the small model's answers stand
                label[unsure] = (await self.large.to_async.classify(pixels[unsure]))["LABEL"]
        return {"LABEL": label}
