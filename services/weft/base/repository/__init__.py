"""Model repositories: control modes, layout, file watching; shared by the router and the services."""
