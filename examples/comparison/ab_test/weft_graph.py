import weft
from weft import INT64, STRING, Tensor, header, request

m = weft.models("models")


@weft.graph(max_batch_size=32)
def ab_test(IMAGE: Tensor[STRING, 1]) -> weft.Outputs(LABEL=Tensor[INT64, 1]):
    pixels = m.decode_digit(IMAGE).PIXELS
    return weft.split(
        weft.weigh(80, m.digits_cnn(pixels), name="A"),
        weft.weigh(20, m.digits_forest(pixels, fallback=m.digits_cnn), name="B"),
        sticky_by=header("x-user-id", request.id),
        name="ab",
    )
