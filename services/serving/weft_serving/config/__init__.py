"""``config.pbtxt`` of one model: reads, completes and checks it, and defines the model from it."""

from weft_common.repository.layout import CONFIG_FILENAME
from weft_serving.config.definition import ModelDefinition, define_model
from weft_serving.config.override import config_override

__all__ = ["CONFIG_FILENAME", "ModelDefinition", "config_override", "define_model"]
