import asyncio

import numpy as np
from models.ray_models import Decode, Digits, FindDigits
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request


@serve.deployment
class ReadPage:
    def __init__(self, decode: DeploymentHandle, find: DeploymentHandle, read: DeploymentHandle) -> None:
        self.decode, self.find, self.read = decode, find, read

    async def __call__(self, request: Request) -> dict:
        page = await self.decode.remote([(await request.json())["image"]])
        found = await self.find.remote(page[0, 0])
        crops = [found["CROPS"][i : i + 32] for i in range(0, len(found["CROPS"]), 32)]
        read = await asyncio.gather(*[self.read.remote(chunk) for chunk in crops])
        digits = np.concatenate([np.empty((0, 1), np.int64), *(one["LABEL"] for one in read)])
        return {"DIGITS": digits.tolist(), "BOXES": found["BOXES"].tolist()}


app = ReadPage.bind(Decode.bind(96, 32), FindDigits.bind(), Digits.bind("digits_cnn"))
