"""The services behind the router: how one is called, and what each serves."""
