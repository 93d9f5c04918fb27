"""Entry point of a training job.

    python jobs/train.py CONFIG.yaml [key=value ...]

Start it with `ray job submit --working-dir . -- python jobs/train.py ...`, or as the entrypoint of a RayJob. The
cluster's image must have marl-ray installed. `marl-ray submit train` needs no file of this folder.

The file is there because a job's entrypoint names a file of its working directory, and `--working-dir .` sends this one
along with `jobs/configs/`. It does what the command `marl-ray train` does, and nothing else.
"""

import sys

from marl_ray.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
