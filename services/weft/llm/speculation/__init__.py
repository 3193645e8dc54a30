"""Speculation: proposers guess the next tokens, and the target model checks all guesses of a sequence in one step."""
