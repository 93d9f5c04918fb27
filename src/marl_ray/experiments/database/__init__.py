"""Database of experiments: its tables, the migrations that make them, and the clock that its windows run by."""
