import weft
from weft import INT64, STRING, Tensor

m = weft.models("models")


@weft.graph(max_batch_size=32)
def cascade(IMAGE: Tensor[STRING, 1]) -> weft.Outputs(LABEL=Tensor[INT64, 1]):
    pixels = m.decode_digit(IMAGE).PIXELS
    small, large = m.digits_tiny(pixels), m.digits_committee(pixels).soft()
    return weft.cascade(small, large, accept=lambda o: o.PROBS.max() >= 0.8, per_row=True)
