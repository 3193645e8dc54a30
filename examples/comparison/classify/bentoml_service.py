import bentoml
from models.bentoml_models import Decode, DigitsCnn, NameDigit


@bentoml.service
class Classify:
    decode = bentoml.depends(Decode)
    digits = bentoml.depends(DigitsCnn)
    name = bentoml.depends(NameDigit)

    @bentoml.api
    async def infer(self, images: list[str]) -> dict:
        pixels = await self.decode.to_async.decode(images)
        found = await self.digits.to_async.classify(pixels)
        return {"NAME": await self.name.to_async.name(found["PROBS"])}
