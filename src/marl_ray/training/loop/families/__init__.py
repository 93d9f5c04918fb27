"""The two families of runs, of actor-critics and of language models, behind the functions in which they differ."""
