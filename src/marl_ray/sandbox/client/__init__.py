"""The client side of the sandbox: a pool of workers that run and judge programs."""
