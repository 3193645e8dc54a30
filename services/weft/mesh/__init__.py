"""A mesh on one machine: start, watch, restart and replace services as local processes, or fuse them into one."""
