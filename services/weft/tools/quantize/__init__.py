"""``weft quantize``: a folder with fewer bits per weight, and the loss. Needs torch."""
