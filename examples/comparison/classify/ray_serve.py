from models.ray_models import Decode, Digits, NameDigit
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request


@serve.deployment
class Classify:
    def __init__(self, decode: DeploymentHandle, digits: DeploymentHandle, name: DeploymentHandle) -> None:
        self.decode, self.digits, self.name = decode, digits, name

    async def __call__(self, request: Request) -> dict:
        pixels = self.decode.remote((await request.json())["images"])
        found = await self.digits.remote(pixels)
        return {"NAME": await self.name.remote(found["PROBS"])}


app = Classify.bind(Decode.bind(), Digits.bind("digits_cnn"), NameDigit.bind())
