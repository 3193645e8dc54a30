"""A model computed by several processes, its ranks: where a rank is, what it has of the model, and how ranks talk."""
