"""The two families of teams, of actor-critics and of language models, behind the functions in which they differ."""
