"""``Pipeline``, ``Experiment`` and ``Model`` of Seldon Core 2 (mlops.seldon.io).

A pipeline is a flow of messages: every step has a message that it gets and one that it gives, and so has the pipeline
itself. ``flow`` reads them from the file, ``presence`` says which tensors a message has and when there is one, and
``pipeline`` and ``answer`` make steps of a graph of them; ``experiment`` makes splitters.
"""
