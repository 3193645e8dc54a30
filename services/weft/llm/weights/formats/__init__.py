"""How folders store quantised weights: one module for each format, and ``detection``, which picks one."""
