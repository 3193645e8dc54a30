"""Token ids to text, at once or as a stream."""

from weft.serving.detokenizer.detokenizer import Demand, Detokenizer, StopStrings, TextStream, enough_of, is_enough

__all__ = ["Demand", "Detokenizer", "StopStrings", "TextStream", "enough_of", "is_enough"]
