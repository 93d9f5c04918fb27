"""Runs the command line: `python -m marl_ray`."""

from marl_ray.cli import main

if __name__ == "__main__":
    main()
