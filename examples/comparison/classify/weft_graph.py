import weft
from weft import STRING, Tensor

m = weft.models("models")


@weft.graph(max_batch_size=32)
def classify(IMAGE: Tensor[STRING, 1]) -> weft.Outputs(NAME=Tensor[STRING, 1]):
    digits = m.digits_cnn(m.decode_digit(IMAGE).PIXELS)
    return m.name_digit(digits.PROBS)
