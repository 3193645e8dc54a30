"""Who may call, and who listens: TLS from files, keys, and what a key allows. ``docs/security.md`` has the whole."""
