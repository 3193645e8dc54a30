"""Estimates what models need, where they fit and what they cost (``weft plan``); finds settings (``weft tune``)."""
