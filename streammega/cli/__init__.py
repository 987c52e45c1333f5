"""The `streammega` command: one function for each subcommand, and the renderers of reports."""
