"""Entry point of a training job: python jobs/train.py CONFIG.yaml [key=value ...]

Start it with `marl-ray submit train`, with `ray job submit --working-dir . -- python jobs/train.py ...`, or as the
entrypoint of a RayJob. The cluster's image must have marl-ray installed.
"""

import sys

from marl_ray.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
