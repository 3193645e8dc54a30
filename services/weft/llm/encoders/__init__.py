"""Encoders: texts to vectors, or pairs of texts to scores, computed without padding."""
