"""A team that writes programs: a generator, a reviewer, and between them the tests."""

import copy
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

import numpy as np
from typing_extensions import override

from marl_ray.envs.text.base import Demonstration, TextEnv, check_template, find_tasks
from marl_ray.envs.text.code_tests import NO_CODE, ProgramScore, prompt_text, score_program
from marl_ray.envs.text.synthetic.mutants import Mutant, mutants
from marl_ray.envs.text.synthetic.programs import programs
from marl_ray.envs.text.tasks import ProgramTask, read_code
from marl_ray.errors import MarlRayError
from marl_ray.rewards.code import limits_of_tests
from marl_ray.rewards.extraction import extract
from marl_ray.rewards.option_numbers import check_finite, check_not_negative
from marl_ray.rewards.protocol import ChosenReward
from marl_ray.sandbox.client.shared_pool import shared_pool

GENERATOR, REVIEWER = "generator", "reviewer"
PROMPT_FIELDS = ("task", "tests", "code", "result", "review")
_THREADS = 4
"""Threads that play demonstrations: each waits for the sandbox most of its time."""
_REFERENCE_TRIES = 3
"""Runs of a reference before it counts as wrong: on a busy machine one may run out of its time."""


class CodeTeam(TextEnv):
    """A generator writes a program, the sandbox runs its tests, and a reviewer helps while public tests fail.

    While a public test fails and turns are left, the agent `reviewer` reads task, program and result and writes a
    review, and the agent `generator` answers again. So an episode ends when all public tests pass, or after `turns`
    programs. The prompts show the last program only.

    Rewards: at the end both agents get what `reward` pays for the last program, by default the fraction of hidden
    tests. At every program the generator gets `shaping` x the change of the fraction of public tests, and the reviewer
    `review_weight` x the change of the fraction of hidden tests that followed its review. Hidden tests appear in no
    prompt. A call that ends, hangs or breaks the program's process fails all hidden tests.

    data: a file of tasks (see `marl_ray.envs.text.tasks`); by default tasks are made (`marl_ray.envs.text.synthetic`).
    test_data: a file of held-out tasks.
    held_out: the share of `data` that is held out where `test_data` is not given, 0.1.
    levels: the levels of synthetic tasks, 1 and 2.
    count: most made training tasks, 1000.
    turns: most programs of an episode, 2.
    reviewer: False leaves the generator alone with the results. True by default.
    answer: what of an answer is the program: `program`, the default, all of it; `block`, its last fenced block.
    prompt: what the generator reads first, with {task} and {tests}, the public ones.
    review_prompt: what the reviewer reads, with {code} and {result} too.
    repair_prompt: what the generator reads after a program that failed, with {review} too.
    reward: a name of `extensions.REWARD` or `package.module:NAME`, or {NAME: options}; by default `code_tests`.
    shaping: what the generator earns for all public tests, 0.1; finite, 0 or more.
    review_weight: what the reviewer earns for all hidden tests, 0.5; finite.
    timeout_s: CPU seconds of all calls of a program together, 3; of a program that reads stdin, of each run; less than a
        day.
    memory_bytes: memory of the same, 1 GiB; from 64 MiB to 256 TiB.
    mistakes: the share of the demonstrations that repair a wrong program, 0.5.
    seed: orders the training tasks.
    cost: those of `tokens`, `calls` (runs of the sandbox) and `seconds` (their CPU time) that are costs, by default none.

    The answer that `reward` pays for is the last program, empty if there is none.

    Metrics: `pass` (all hidden tests), `hidden`, `public`: fractions at the end; `first`: `pass` of the first program.

    Raises ValueError naming the option whose value is not one of these.
    """

    metadata = {"name": "code_team", "render_modes": [], "is_parallelizable": False}

    def __init__(
        self,
        data: str | None = None,
        test_data: str | None = None,
        held_out: float = 0.1,
        levels: Sequence[int] = (1, 2),
        count: int = 1000,
        turns: int = 2,
        reviewer: bool = True,
        answer: Literal["program", "block"] = "program",
        prompt: str = "{task}\n",
        review_prompt: str = "{task}\n{code}\n{result}\n?",
        repair_prompt: str = "{task}\n{code}\n{result}\n{review}\n!",
        reward: ChosenReward = "code_tests",
        shaping: float = 0.1,
        review_weight: float = 0.5,
        timeout_s: float = 3.0,
        memory_bytes: int = 1 << 30,
        mistakes: float = 0.5,
        seed: int = 0,
        cost: Sequence[str] = (),
    ):
        if not turns >= 1:
            raise ValueError(f"turns={turns}, expected 1 or more")
        if answer not in ("program", "block"):
            raise ValueError(f"answer={answer!r}, expected 'program' or 'block'")
        if not 0 <= mistakes <= 1:
            raise ValueError(f"mistakes={mistakes}, expected 0 to 1")
        check_not_negative("shaping", shaping)
        check_finite("review_weight", review_weight)
        train, test = find_tasks(data, test_data, held_out, read_code, partial(programs, count, tuple(levels)))
        super().__init__([GENERATOR, REVIEWER][: 1 + reviewer], train, test, seed=seed, cost=cost, reward=reward)
        self.turns, self.answer, self.mistakes = turns, answer, mistakes
        self.shaping, self.review_weight = shaping, review_weight
        self.limits = limits_of_tests(timeout_s, memory_bytes)
        self.prompt = check_template("prompt", prompt, PROMPT_FIELDS[:2])
        self.review_prompt = check_template("review_prompt", review_prompt, PROMPT_FIELDS[:4])
        self.repair_prompt = check_template("repair_prompt", repair_prompt, PROMPT_FIELDS)

    @override
    def begin(self) -> None:
        self._code, self.checked, self._first = "", ProgramScore(0.0, 0.0, NO_CODE, 0, 0.0), 0.0
        self._programs = 0
        self.ask(GENERATOR, self._fill_prompt(self.prompt))

    @override
    def act(self, agent: str, text: str) -> None:
        if agent == REVIEWER:
            self.ask(GENERATOR, self._fill_prompt(self.repair_prompt, text))
            return
        before = self.checked
        self._code, self.checked = text, self._check(text)
        after = self.checked
        self._programs += 1
        self.spend(GENERATOR, calls=after.runs, seconds=after.cpu_s)
        self.earn(self.shaping * (after.public - before.public), GENERATOR)
        if self._programs == 1:
            self._first = float(after.hidden == 1)
        elif REVIEWER in self.agents:
            self.earn(self.review_weight * (after.hidden - before.hidden), REVIEWER)
        if after.public == 1 or self._programs == self.turns:
            self._end()
        elif REVIEWER in self.agents:
            self.ask(REVIEWER, self._fill_prompt(self.review_prompt))
        else:
            self.ask(GENERATOR, self._fill_prompt(self.repair_prompt))

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Return all turns of `count` episodes of the training tasks in the order that `seed` gives, played by experts.

        The generator writes the reference. In the share `mistakes` where there are turns to repair it, the reference with
        one token changed, so that a public test fails, continues in its place; the reviewer says which; the generator
        repairs it. Nobody is shown to make the mistake. Raises MarlRayError for a task whose reference is missing or fails.
        """
        with ThreadPoolExecutor(_THREADS) as threads:
            episodes = list(threads.map(partial(self._demonstrate, seed), range(count)))
        return [turn for episode in episodes for turn in episode]

    def _demonstrate(self, seed: int, index: int) -> list[Demonstration]:
        env = copy.copy(self)
        env.seed, env._random = seed, np.random.default_rng(seed)  # noqa: SLF001  a copy of itself
        env.reset(options={"index": index})
        task: ProgramTask = env.task
        if not task.code.reference:
            raise MarlRayError(f"task {task.task_id}: reference: expected one, for demonstrations")
        draw = random.Random(f"{seed} {index}")
        # Without public tests nobody notices a mistake, and every episode has all its programs.
        is_noticed = env.turns > 1 and bool(task.code.public)
        mistakes = mutants(task.code.reference) if is_noticed and draw.random() < env.mistakes else []
        programs_without_mistake = 1 if is_noticed else env.turns
        no_mistake = [None] * _REFERENCE_TRIES  # also where no test noticed the mistake
        for mistake in [draw.choice(mistakes), *no_mistake] if mistakes else no_mistake:
            env.reset(options={"index": index})
            turns = env._play_experts(mistake)  # noqa: SLF001  a copy of itself
            written = sum(turn.agent == GENERATOR for turn in turns)
            if env.checked.hidden == 1 and written == (2 if mistake else programs_without_mistake):
                return turns
        raise MarlRayError(f"task {task.task_id}: reference: fails its tests ({env.checked.report})")

    def _play_experts(self, mistake: Mutant | None) -> list[Demonstration]:
        """Return the experts' turns in the episode that has begun."""
        demonstrations: list[Demonstration] = []
        while not self.terminations[GENERATOR]:
            agent = self.agent_selection
            if agent == REVIEWER:
                response = f"{mistake.wrong} should be {mistake.right}" if mistake else ""
            else:
                response = self._format_answer(self.task.code.reference)
            begins = not demonstrations
            demonstrations.append(Demonstration(agent, self.observe(agent), response))
            self.step(self._format_answer(mistake.code) if begins and mistake else response)
        return demonstrations

    def _format_answer(self, code: str) -> str:
        return f"```python\n{code}\n```" if self.answer == "block" else code

    def _check(self, text: str) -> ProgramScore:
        program = self._program(text)
        if not program.strip():
            return ProgramScore(0.0, 0.0, NO_CODE, 0, 0.0)
        return score_program(shared_pool(), program, self.task.code, self.limits)

    def _program(self, text: str) -> str:
        """Return the program in a response; empty if there is none."""
        return text if self.answer == "program" else extract(text, self.task.code.entry_point) or ""

    def _end(self) -> None:
        last = self.checked
        metrics = {"pass": float(last.hidden == 1), "hidden": last.hidden, "public": last.public, "first": self._first}
        self.finish(last.hidden == 1, self.pay(self._program(self._code), metrics))

    def _fill_prompt(self, template: str, review: str = "") -> str:
        tests = "\n".join(prompt_text(test) for test in self.task.code.public)
        return template.format(
            task=self.task.prompt, tests=tests, code=self._code, result=self.checked.report, review=review
        )
