"""One experiment inside a replica: the arms that answer its units, and the rules that assign them."""
