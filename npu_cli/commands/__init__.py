"""One module a command: `execute` takes the parsed command line and returns the exit status."""
