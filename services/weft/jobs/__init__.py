"""Jobs: a data set through a graph or model, into files, each row exactly once."""
