"""The documents for programs that commands print with --json, and the page that describes every command."""
