"""Problems with an answer, for one agent."""

from collections.abc import Sequence
from functools import partial

from typing_extensions import override

from marl_ray.envs.text.base import Demonstration, TextEnv, check_template, find_tasks, task_index
from marl_ray.envs.text.synthetic.arithmetic import arithmetic
from marl_ray.envs.text.tasks import MathTask, read_math
from marl_ray.errors import MarlRayError
from marl_ray.rewards.math_answers import TOLERANCE
from marl_ray.rewards.math_reward import math_reward
from marl_ray.rewards.option_numbers import check_not_negative
from marl_ray.rewards.protocol import ChosenReward

SOLVER = "solver"


class MathTasks(TextEnv):
    """The agent `solver` answers a problem once. Reward 1 for the right answer, 0 otherwise, or what `reward` pays.

    data: a file of tasks (see `marl_ray.envs.text.tasks`); by default tasks of arithmetic are made.
    test_data: a file of held-out tasks.
    held_out: the share of `data` that is held out where `test_data` is not given, 0.1.
    levels: the levels of synthetic tasks, 1 and 2.
    count: most made training tasks, 2000.
    prompt: what the agent reads, with {task}.
    tolerance: relative, of answers that are no whole numbers.
    reward: a name of `extensions.REWARD` or `package.module:NAME`, or {NAME: options}; by default `solved`. Its answer is
    the agent's text.
    seed: orders the training tasks.
    cost: those of `tokens`, `calls` and `seconds` that are costs, by default none.

    Metrics: `pass`, 1.0 or 0.0.

    Raises ValueError if `tolerance` is negative or not finite.
    """

    metadata = {"name": "math", "render_modes": [], "is_parallelizable": False}

    def __init__(
        self,
        data: str | None = None,
        test_data: str | None = None,
        held_out: float = 0.1,
        levels: Sequence[int] = (1, 2),
        count: int = 2000,
        prompt: str = "{task}",
        tolerance: float = TOLERANCE,
        seed: int = 0,
        cost: Sequence[str] = (),
        reward: ChosenReward = "solved",
    ):
        check_not_negative("tolerance", tolerance)
        made = partial(arithmetic, count, tuple(levels))
        train, test = find_tasks(data, test_data, held_out, read_math, made)
        super().__init__([SOLVER], train, test, seed=seed, cost=cost, reward=reward)
        self._train = train
        self.template, self.tolerance = check_template("prompt", prompt, ["task"]), tolerance

    @override
    def begin(self) -> None:
        self.ask(SOLVER, self._prompt(self.task))

    @override
    def act(self, agent: str, text: str) -> None:
        right = math_reward(text, self.task.answer, self.tolerance)
        self.finish(right == 1.0, self.pay(text, {"pass": right}))

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Return the right answers to the first `count` training tasks of the order that `seed` gives.

        The answers are the solutions where the data has them. Each says its answer as `math_reward` reads it; otherwise
        MarlRayError names the task.
        """
        result = []
        for index in range(count):
            task = self._train[task_index(len(self._train), seed, index)]
            response = task.solution or task.answer
            if not math_reward(response, task.answer, self.tolerance):
                raise MarlRayError(f"task {task.task_id}: solution: expected to end with the answer {task.answer!r}")
            result.append(Demonstration(SOLVER, self._prompt(task), response))
        return result

    def _prompt(self, task: MathTask) -> str:
        return self.template.format(task=task.prompt)
