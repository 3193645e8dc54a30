"""The models as services of BentoML."""

import bentoml
import numpy as np
from models import plain


class _Digits:
    name: str

    def __init__(self) -> None:
        self.model = plain.Digits(self.name)

    @bentoml.api
    def classify(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        return self.model(pixels)


@bentoml.service
class DigitsTiny(_Digits):
    name = "digits_tiny"


@bentoml.service
class DigitsCnn(_Digits):
    name = "digits_cnn"


@bentoml.service
class DigitsForest(_Digits):
    name = "digits_forest"


@bentoml.service
class DigitsCommittee(_Digits):
    name = "digits_committee"


@bentoml.service
class Decode:
    @bentoml.api
    def decode(self, images: list[str], width: int = 8, height: int = 8) -> np.ndarray:
        return plain.decode(images, width, height)


@bentoml.service
class NameDigit:
    @bentoml.api
    def name(self, probs: np.ndarray) -> list[str]:
        return plain.name_digit(probs)


@bentoml.service
class FindDigits:
    @bentoml.api
    def find(self, page: np.ndarray) -> dict[str, np.ndarray]:
        return plain.find_digits(page)
