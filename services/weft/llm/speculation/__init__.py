"""Speculation: proposers guess the next tokens, and the target model verifies all guesses of a sequence in one step."""
