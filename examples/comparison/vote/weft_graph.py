import weft
from weft import INT64, STRING, Tensor

m = weft.models("models")


@weft.graph(max_batch_size=32)
def vote(IMAGE: Tensor[STRING, 1]) -> weft.Outputs(LABEL=Tensor[INT64, 1]):
    pixels = m.decode_digit(IMAGE).PIXELS
    return weft.ensemble(
        m.digits_cnn(pixels, weight=3).soft(),
        m.digits_forest(pixels, weight=2).soft(),
        m.digits_tiny(pixels, weight=2).soft(),
        quorum=2,
        straggler_ms=200,
        combine=[{"output": "LABEL", "method": "VOTE", "weighted": True}],
    )
