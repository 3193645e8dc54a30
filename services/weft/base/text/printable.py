"""Text of others on a terminal."""


def printable(text: str) -> str:
    """The text, with U+FFFD for characters that a terminal obeys rather than shows; line ends and tabs are left."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
