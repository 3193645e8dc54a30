"""What ``check``, ``lsp``, ``draw``, ``explain``, ``convert``, ``lock``, ``top`` and ``quantize`` do, as functions.

They take typed values and return results or text; ``weft.cli`` parses arguments and prints. Only ``live_signatures``
and ``top`` need a running mesh; only ``quantize`` imports torch.
"""
