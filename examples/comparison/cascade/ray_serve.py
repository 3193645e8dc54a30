import contextlib

import numpy as np
from models.ray_models import Decode, Digits
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request


@serve.deployment
class Cascade:
    def __init__(self, decode: DeploymentHandle, small: DeploymentHandle, large: DeploymentHandle) -> None:
        self.decode, self.small, self.large = decode, small, large

    async def __call__(self, request: Request) -> dict:
        pixels = await self.decode.remote((await request.json())["images"])
        found = await self.small.remote(pixels)
        label, unsure = np.array(found["LABEL"]), found["PROBS"].max(axis=1) < 0.8
        if unsure.any():
            with contextlib.suppress(Exception):  # the small model's answers stand
                label[unsure] = (await self.large.remote(pixels[unsure]))["LABEL"]
        return {"LABEL": label.tolist()}


app = Cascade.bind(Decode.bind(), Digits.bind("digits_tiny"), Digits.bind("digits_committee"))
