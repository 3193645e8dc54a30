"""Model repositories: what the router and the services do alike with a folder of graphs or models."""
