"""``Pipeline``, ``Experiment`` and ``Model`` of Seldon Core 2 (mlops.seldon.io).

A pipeline is a flow of messages: every step has a message that it gets and one that it gives, and so has the pipeline
itself. ``flow`` reads them from the file, ``parts`` puts those that a graph needs in order and names their tensors,
``presence`` says which tensors a message has and when there is one, ``pipeline`` makes a draft of them. ``experiment``
makes splitters.
"""
