"""The services behind the router: calling them, and discovering what each serves."""
