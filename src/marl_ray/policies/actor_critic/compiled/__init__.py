"""Small actor-critics evaluated and trained by code that numba compiles."""
