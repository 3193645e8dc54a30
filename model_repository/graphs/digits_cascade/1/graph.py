from pathlib import Path

import weft
from weft import FP32, INT64, STRING, Tensor, parameter

REPOSITORY = Path(__file__).parents[3]
m = weft.models(REPOSITORY)


@weft.node
def small_to_large(PIXELS):
    return weft.cascade(
        m.digits_tiny(
            PIXELS,
            name="tiny",
            when=parameter("quality", "auto") != "best",
            accept=lambda o: o.PROBS.max() >= 0.8,
        ),
        m.digits_committee(PIXELS, name="committee", min_remaining_ms=50).soft(),
        per_row=True,
    )


@weft.graph(max_batch_size=32, timeout_ms=2000)
def digits_cascade(IMAGE: Tensor[STRING, 1]) -> weft.Outputs(LABEL=Tensor[INT64, 1], PROBS=Tensor[FP32, 10]):
    """A picture of a handwritten digit to the digit, cheaply: a linear layer answers first, and only the pictures of a
    batch that it is unsure of travel on to the committee. If the committee fails or there is no time for it, the
    first answer stands. The parameter quality=best sends every picture to the committee.
    """
    decode = m.decode_digit(IMAGE, name="decode")
    return small_to_large(decode.PIXELS, name="classify")


if __name__ == "__main__":
    weft.write(digits_cascade, to=REPOSITORY)
