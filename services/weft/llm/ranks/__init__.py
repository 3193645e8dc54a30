"""An engine's runner whose steps are computed by ranks, processes of their own."""
