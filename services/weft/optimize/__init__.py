"""Makes models smaller and faster, behind an accuracy gate."""
