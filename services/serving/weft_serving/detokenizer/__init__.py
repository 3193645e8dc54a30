"""Token ids to text, all at once or as they come."""

from weft_serving.detokenizer.detokenizer import Detokenizer, TextStream
from weft_serving.detokenizer.stop import StopStrings

__all__ = ["Detokenizer", "StopStrings", "TextStream"]
