import weft
from weft import INT64, STRING, Tensor

m = weft.models("models")


@weft.graph
def read_page(PAGE: Tensor[STRING, 1]) -> weft.Outputs(DIGITS=Tensor[INT64, -1, 1], BOXES=Tensor[INT64, -1, 4]):
    found = m.find_digits(m.decode_page(PAGE).PIXELS)
    read = weft.each(m.digits_cnn, over=found.CROPS)
    return {"DIGITS": read.LABEL, "BOXES": found.BOXES}
