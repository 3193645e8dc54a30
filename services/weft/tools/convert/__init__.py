"""``weft convert``: inference graphs of KServe and Seldon Core to ``graph.pbtxt``.

A file goes through four forms: a YAML tree with positions (``yaml_tree``), a draft of the graph (``kserve``,
``seldon_v1``, ``seldon_v2``), the same draft with tensors (``wiring``, ``conditions``), and text (``draft.write``).
"""
