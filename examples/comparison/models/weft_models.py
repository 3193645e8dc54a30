"""The models of Weft: samples and models of the cookbook, and the one that neither has.

``python -m examples.comparison.models.weft_models DIR`` writes a repository that has all of them.
"""

import sys
from pathlib import Path

import numpy as np
from examples.cookbook import PAGE, write_repository

import weft
from weft import FP32, STRING, Tensor

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@weft.model(max_batch_size=32, execution="inline")
def name_digit(PROBS: Tensor[FP32, 10]) -> weft.Outputs(NAME=Tensor[STRING, 1]):
    return {"NAME": np.array(NAMES, np.object_)[PROBS.argmax(axis=1)][:, None]}


if __name__ == "__main__":
    weft.write(name_digit, to=write_repository(Path(sys.argv[1]), PAGE.read_text()))
