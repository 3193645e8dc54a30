"""``weft tune``: searches settings of a graph's models on this machine, under recorded or generated load."""
