"""Converts ``Pipeline``, ``Experiment`` and ``Model`` of Seldon Core 2 (mlops.seldon.io).

A pipeline is a flow of messages: every step, and the pipeline itself, has an input and an output message. ``flow``
reads them, ``parts`` orders those that a graph needs and names their tensors, ``presence`` determines which tensors a
message has and when it exists, ``pipeline`` makes a draft. ``experiment`` makes splitters.
"""
