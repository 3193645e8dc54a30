"""A mesh on one machine: start, watch, restart and replace services as processes, or run them in one.

``weft up``, ``weft restart`` and ``weft edge`` use it. In programs and tests, ``running.running_mesh`` starts a mesh
and yields the addresses of its services once each is SERVING.
"""
