"""The tasks and evaluators of WebArena and WebArena-Verified, sites to practise on, and the environment."""
