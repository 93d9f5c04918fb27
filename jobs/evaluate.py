"""Entry point of an evaluation job.

    python jobs/evaluate.py --benchmark NAME (--samples URI | --policy BUNDLE) [options]

Start it with `ray job submit --working-dir . -- python jobs/evaluate.py ...`. Samples and problems are read by the
driver, so URIs (`s3://...`) work wherever it runs; `--out` is a folder of the driver's machine.

The file is there for the reason that `jobs/train.py` gives, and does what the command `marl-ray evaluate` does.
"""

import sys

from marl_ray.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
