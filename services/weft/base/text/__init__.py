"""Human-written text: protobuf text format, command-line numbers, spelling suggestions."""
