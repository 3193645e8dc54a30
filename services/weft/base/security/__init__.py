"""Authentication, authorisation and TLS. See ``docs/security.md``."""
