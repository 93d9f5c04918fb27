"""The server side of the sandbox: processes that fork, watch and judge programs."""
