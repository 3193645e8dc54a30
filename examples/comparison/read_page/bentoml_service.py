import asyncio

import bentoml
import numpy as np
from models.bentoml_models import Decode, DigitsCnn, FindDigits


@bentoml.service
class ReadPage:
    decode = bentoml.depends(Decode)
    find = bentoml.depends(FindDigits)
    read = bentoml.depends(DigitsCnn)

    @bentoml.api
    async def infer(self, image: str) -> dict[str, np.ndarray]:
        page = await self.decode.to_async.decode([image], width=96, height=32)
        found = await self.find.to_async.find(page[0, 0])
        crops = [found["CROPS"][i : i + 32] for i in range(0, len(found["CROPS"]), 32)]
        read = await asyncio.gather(*[self.read.to_async.classify(chunk) for chunk in crops])
        digits = np.concatenate([np.empty((0, 1), np.int64), *(one["LABEL"] for one in read)])
        return {"DIGITS": digits, "BOXES": found["BOXES"]}
