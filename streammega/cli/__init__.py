"""The command line: every command, and what is printed or drawn."""
