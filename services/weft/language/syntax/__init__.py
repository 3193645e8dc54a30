"""Parsed graph files: source, fields, diagnostics."""
