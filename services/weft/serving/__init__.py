"""A V2 model server as a library: repository, lifecycle, scheduler, instances and statistics."""
