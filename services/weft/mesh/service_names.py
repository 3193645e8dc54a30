"""Names of the services of a mesh; imports nothing heavy."""

#: Services that serve models; the folder in the repository has the service's name.
MODEL_SERVICES = ("preprocess", "model", "postprocess")
#: The folder of the router in the repository.
GRAPHS = "graphs"
#: Serves graphs to clients.
ROUTER = "router"
#: Serves HTTP in front of the router.
GATEWAY = "gateway"
#: A gateway for this machine alone, with the page.
PAGE = "page"


def is_public(service: str) -> bool:
    """Whether clients of the mesh connect to a service, so that its TLS and keys apply to its ports."""
    return service in (ROUTER, GATEWAY)
