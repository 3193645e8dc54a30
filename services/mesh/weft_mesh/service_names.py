"""Names of the services of a mesh."""

#: Services that serve models; the folder in the repository has the service's name.
MODEL_SERVICES = ("preprocess", "model", "postprocess")
#: Serves HTTP in front of the router.
GATEWAY = "gateway"
