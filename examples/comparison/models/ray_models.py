"""The models as deployments of Ray Serve."""

import numpy as np
from models import plain
from ray import serve


@serve.deployment
class Decode:
    def __init__(self, width: int = 8, height: int = 8) -> None:
        self.size = width, height

    def __call__(self, images: list[str]) -> np.ndarray:
        return plain.decode(images, *self.size)


@serve.deployment
class Digits:
    def __init__(self, name: str) -> None:
        self.model = plain.Digits(name)

    def __call__(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        return self.model(pixels)


@serve.deployment
class NameDigit:
    def __call__(self, probs: np.ndarray) -> list[str]:
        return plain.name_digit(probs)


@serve.deployment
class FindDigits:
    def __call__(self, page: np.ndarray) -> dict[str, np.ndarray]:
        return plain.find_digits(page)
