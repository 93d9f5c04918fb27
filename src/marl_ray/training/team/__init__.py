"""Which policies play and learn, and whether they fit."""
