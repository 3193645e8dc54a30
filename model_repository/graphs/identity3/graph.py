from pathlib import Path

import weft
from weft import FP32, Tensor

REPOSITORY = Path(__file__).parents[2]
m = weft.models(REPOSITORY)


@weft.graph(platform="ensemble", max_batch_size=64)
def identity3(INPUT0: Tensor[FP32, 16]) -> weft.Outputs(OUTPUT0=Tensor[FP32, 16]):
    """Three identities in a row, in the ensemble syntax of Triton Inference Server."""
    identity = m.identity(INPUT0, outputs={"OUTPUT0": "first"}, model_version=-1)
    identity_2 = m.identity(identity.first, outputs={"OUTPUT0": "second"}, model_version=-1)
    return m.identity(identity_2.second, outputs={"OUTPUT0": "OUTPUT0"}, model_version=-1)


if __name__ == "__main__":
    weft.write(identity3, to=REPOSITORY)
