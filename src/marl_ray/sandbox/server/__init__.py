"""The processes that fork, watch and judge programs."""
