"""Which generation computes which tokens in the next step; plain Python, no tensor library."""
