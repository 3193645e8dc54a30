from pathlib import Path

import weft
from weft import FP32, INT64, STRING, Tensor, header, request

REPOSITORY = Path(__file__).parents[3]
m = weft.models(REPOSITORY)


@weft.node
def ab(PIXELS):
    return weft.split(
        m.digits_cnn(PIXELS, name="A", weight=80),
        m.digits_mlp(PIXELS, name="B", weight=20, fallback=m.digits_cnn),
        m.digits_forest(PIXELS, name="C", shadow={"percent": 25, "max_inflight": 4}),
        sticky_by=header("x-user-id", request.id),
        salt="digits-cnn-or-mlp",
    )


@weft.graph(max_batch_size=32)
def digits_ab(IMAGE: Tensor[STRING, 1]) -> weft.Outputs(LABEL=Tensor[INT64, 1], PROBS=Tensor[FP32, 10]):
    """An A/B test: one user in five gets the perceptron, and always gets it. Who the user is says the header "x-user-
    id", or the request's id without one. If the perceptron fails, its users get the network. One request in four is
    copied to the forest, a candidate that is watched and never answers.
    """
    decode = m.decode_digit(IMAGE, name="decode")
    return ab(decode.PIXELS, name="classify")


if __name__ == "__main__":
    weft.write(digits_ab, to=REPOSITORY)
