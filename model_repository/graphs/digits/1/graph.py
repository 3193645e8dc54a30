from pathlib import Path

import weft
from weft import FP32, INT64, STRING, Tensor

REPOSITORY = Path(__file__).parents[3]
m = weft.models(REPOSITORY)


@weft.node
def vote(PIXELS):
    return weft.ensemble(
        m.digits_cnn(PIXELS, name="cnn", weight=3),
        m.digits_mlp(PIXELS, name="mlp", weight=2).soft(),
        m.digits_forest(PIXELS, name="forest", weight=2).soft(),
        combine=[
            {"output": "LABEL", "method": "VOTE", "weighted": True},
            {"output": "PROBS", "method": "AVERAGE", "weighted": True},
        ],
        quorum=2,
        straggler_ms=200,
    )


@weft.graph(max_batch_size=32)
def digits(IMAGE: Tensor[STRING, 1]) -> weft.Outputs(LABEL=Tensor[INT64, 1], PROBS=Tensor[FP32, 10]):
    """A picture of a handwritten digit to the digit: three classifiers of different kinds vote. The weights let two
    that agree beat the third, and the network win when no two do. Two answers are enough, the network's among them:
    what is more than 200 ms later is left out.
    """
    decode = m.decode_digit(IMAGE, name="decode")
    return vote(decode.PIXELS, name="classify")


if __name__ == "__main__":
    weft.write(digits, to=REPOSITORY)
