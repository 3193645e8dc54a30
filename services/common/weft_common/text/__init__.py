"""Text that people write: protobuf text format, numbers in options, and the name that was probably meant."""
