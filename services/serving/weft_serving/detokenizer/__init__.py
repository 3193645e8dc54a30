"""Token ids to text, at once or as a stream."""

from weft_serving.detokenizer.context import Demand, enough_of, is_enough
from weft_serving.detokenizer.detokenizer import Detokenizer, TextStream
from weft_serving.detokenizer.stop import StopStrings

__all__ = ["Demand", "Detokenizer", "StopStrings", "TextStream", "enough_of", "is_enough"]
