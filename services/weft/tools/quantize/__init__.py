"""``weft quantize``: a folder with fewer bits per weight, and what that costs. Needs torch."""
