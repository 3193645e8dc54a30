"""V2 over HTTP: the Open Inference Protocol, with Triton Inference Server's extensions."""

from weft_gateway.v2.routes import endpoint_of as endpoint_of
from weft_gateway.v2.routes import routes as routes
