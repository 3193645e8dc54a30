"""Child processes: one service as a child, and when to start it again."""
