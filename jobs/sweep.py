"""Entry point of a sweep's job: python jobs/sweep.py CONFIG.yaml [key=value ...]

Start it with `marl-ray submit sweep`, with `ray job submit --working-dir . -- python jobs/sweep.py ...`, or as the
entrypoint of a RayJob. The cluster's image must have marl-ray installed.
"""

import sys

from marl_ray.cli import main

if __name__ == "__main__":
    main(["sweep", *sys.argv[1:]])
