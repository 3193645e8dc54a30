"""What a change does: recorded traffic replayed, answers compared."""
