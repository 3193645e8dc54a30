"""Models from load to unload: repository, versions, loading on demand, response cache."""
