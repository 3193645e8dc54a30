"""Models from load to unload: repository, versions, on demand, response cache."""
