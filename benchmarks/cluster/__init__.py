"""Language models on hundreds of replicas in virtual time: ``python -m benchmarks.cluster``."""
