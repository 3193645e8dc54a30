"""The report of models on a device: what each needs, how fast it is, where it goes."""
