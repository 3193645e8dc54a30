"""What batch jobs and message streams hold when they are killed, and what they cost."""
