"""Token ids to text, at once or as a stream."""

from weft.serving.detokenizer.context import Demand, enough_of, is_enough
from weft.serving.detokenizer.detokenizer import Detokenizer, TextStream
from weft.serving.detokenizer.stop import StopStrings

__all__ = ["Demand", "Detokenizer", "StopStrings", "TextStream", "enough_of", "is_enough"]
