"""What every Weft service shares: errors, tensors, the V2 servicer, health, telemetry and the server bootstrap."""
