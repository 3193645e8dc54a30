"""What the language-model engine does: throughput, latencies, fairness, and the same work in ``transformers``."""
