"""One checker for each kind of extension: `check(name, settings)` yields the properties that such a part must have."""
