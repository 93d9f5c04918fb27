"""Says in one line what pydantic refused: the key, what it holds and what was expected."""
