"""The database of experiments: its tables, their migrations, and the clock of its windows."""
