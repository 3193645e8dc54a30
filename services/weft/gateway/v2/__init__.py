"""V2 over HTTP: the Open Inference Protocol, with Triton Inference Server's extensions."""

from weft.gateway.v2.routes import endpoint_of as endpoint_of
from weft.gateway.v2.routes import routes as routes
