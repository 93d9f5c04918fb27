"""WebArena: its tasks and those of WebArena-Verified, their evaluators, sites to practise on, and the environment."""
