"""The pages of the documentation, read block by block and followed as a reader follows them."""
