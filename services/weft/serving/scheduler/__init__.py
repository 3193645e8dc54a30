"""Which request runs when: policy in plain Python with the time passed in."""
