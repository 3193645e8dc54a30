"""The four services; each module is the main of one: ``python -m weft.services.model``."""
