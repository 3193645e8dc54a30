"""Formats of quantised weights in folders, a module each; ``weight_format`` picks one."""
