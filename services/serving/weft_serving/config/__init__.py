"""``config.pbtxt`` of one model: read, completed, checked, and turned into what the server needs to load it."""

from weft_serving.config.definition import CONFIG_FILENAME, ModelDefinition, define_model

__all__ = ["CONFIG_FILENAME", "ModelDefinition", "define_model"]
