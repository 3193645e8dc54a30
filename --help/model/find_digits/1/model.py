import numpy as np
import triton_python_backend_utils as pb_utils
from scipy import ndimage


def boxes_of(page):
    """Left, top, right and bottom of every patch of ink, line by line; [k, 4]."""
    near = ndimage.binary_dilation(page > 2, np.ones((3, 3)))  # strokes with a gap of a pixel are one patch
    patches = ndimage.find_objects(ndimage.label(near)[0])
    boxes = [(x.start + 1, y.start + 1, x.stop - 1, y.stop - 1) for y, x in patches]
    return np.array(sorted(boxes, key=lambda box: (box[1] // 16, box[0])), np.int64).reshape(-1, 4)


def crop(page, left, top, right, bottom):
    """A patch in the middle of 8 x 8 pixels."""
    ink, middle = page[top:bottom, left:right][:8, :8], np.zeros((1, 8, 8), np.float32)
    y, x = (8 - ink.shape[0]) // 2, (8 - ink.shape[1]) // 2
    middle[0, y : y + ink.shape[0], x : x + ink.shape[1]] = ink
    return middle


class TritonPythonModel:
    def execute(self, requests):
        return [self.find(request) for request in requests]

    def find(self, request):
        page = pb_utils.get_input_tensor_by_name(request, "PIXELS").as_numpy()[0]
        boxes = boxes_of(page)
        crops = np.array([crop(page, *box) for box in boxes], np.float32).reshape(-1, 1, 8, 8)
        return pb_utils.InferenceResponse([pb_utils.Tensor("CROPS", crops), pb_utils.Tensor("BOXES", boxes)])
