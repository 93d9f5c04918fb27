"""One checker for each kind of extension, whose `check(name, settings)` yields the properties of such a part."""
