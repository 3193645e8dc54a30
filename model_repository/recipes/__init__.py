"""How each sample model is built: ``catalog`` says what, the other modules how. ``build.py`` is the command."""
