"""The two families of policies, actor-critics and language models, behind the functions that a learner calls."""
