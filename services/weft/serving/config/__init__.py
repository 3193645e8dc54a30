"""``config.pbtxt`` of one model: reads, completes and checks it, and defines the model from it."""

from weft.base.repository.layout import CONFIG_FILENAME
from weft.serving.config.definition import ModelDefinition, define_model
from weft.serving.config.override import config_override

__all__ = ["CONFIG_FILENAME", "ModelDefinition", "config_override", "define_model"]
