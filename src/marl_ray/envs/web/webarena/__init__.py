"""WebArena: its tasks and those of WebArena-Verified, their evaluators, made sites to practise on, and the environment."""
