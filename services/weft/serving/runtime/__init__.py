"""A loaded model version: queue, instances, answers and statistics."""
