"""Questions for one agent with tools."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from marl_ray.agents import react_format
from marl_ray.agents.calls import parse_call
from marl_ray.agents.made_up_country import QUESTION_KINDS, CountryQuestion, QuestionStep, questions
from marl_ray.agents.react_format import CallResult, ReactTurn, find_tool, write_transcript
from marl_ray.agents.tools import make_tools
from marl_ray.deadlines.seconds import check_seconds
from marl_ray.envs.text.base import Demonstration, Task, TextEnv, find_tasks, task_index
from marl_ray.envs.text.tasks import MathTask, read_math
from marl_ray.rewards.answers import same_answer
from marl_ray.rewards.protocol import ChosenReward

SEARCH_TOOL, TOWNS_CORPUS = "google_search_serper", "towns"
MADE_UP_TOOLS: dict[str, dict[str, object]] = {"code_interpreter": {}, SEARCH_TOOL: {"corpus": TOWNS_CORPUS}}
"""Tools for the questions about a made-up country, all of them offline."""
_NO_CALLS = "No tool calls are left. Give the answer."


class React(TextEnv):
    """One agent thinks, calls a tool, reads the result, and calls `answer` at the end.

    The format is that of `marl_ray.agents.react_format`. Reward 1 for the right answer, 0 for another or none, or what
    `reward` pays. Answers are compared as in mathematics, and words without case, punctuation and articles.

    tools: names, or names with options; `package.module:callable` for own ones. `answer` is always there, and by default
        `code_interpreter` and a search in the made-up country.
    data: a file of tasks (see `marl_ray.envs.text.tasks`); by default questions about a made-up country and sums
        (`marl_ray.agents.made_up_country`).
    test_data: a file of held-out tasks.
    held_out: the share of `data` that is held out where `test_data` is not given, 0.1.
    kinds: those of the made-up questions; by default all that the tools can answer within the limits.
    agent: the agent's name, `agent`.
    max_turns: responses in an episode, 6.
    max_calls: most runs of tools other than `answer`, by default without a limit; none happens beyond, so an episode's
        cost `calls` never exceeds it.
    timeout_s: seconds that one call may take, 20; less than a day.
    observation_limit: characters of an observation, 400.
    prompt_limit: characters of a prompt from which the earliest turns are left out, 4000.
    instructions: the text before the question, in place of the one made from the tools.
    seed: orders the training tasks.
    cost: those of `tokens`, `calls` and `seconds` that are costs, by default none.
    reward: a name of `extensions.REWARD` or `package.module:NAME`, or {NAME: options}; by default `solved`. Its answer is
        what the agent gave to the tool `answer`, empty if nothing.

    Metrics: `pass`, 1.0 or 0.0; `answered`; `calls`, runs of tools; `failed_actions`, turns without a working call.

    Raises ValueError naming the option whose value makes no sense, or does not fit the others.
    """

    metadata = {"name": "react", "render_modes": [], "is_parallelizable": False}
    fixed = (*TextEnv.fixed, "tools")

    def __init__(
        self,
        tools: Iterable[str] | Mapping[str, Mapping[str, object] | None] = MADE_UP_TOOLS,
        data: str | None = None,
        test_data: str | None = None,
        held_out: float = 0.1,
        kinds: Sequence[str] | None = None,
        agent: str = "agent",
        max_turns: int = 6,
        max_calls: int | None = None,
        timeout_s: float = 20.0,
        observation_limit: int = 400,
        prompt_limit: int = 4000,
        instructions: str | None = None,
        seed: int = 0,
        cost: Sequence[str] = (),
        reward: ChosenReward = "solved",
    ):
        for name, value in {"max_turns": max_turns, "observation_limit": observation_limit}.items():
            if not value > 0:
                raise ValueError(f"{name}={value}, expected more than 0")
        check_seconds("timeout_s", timeout_s)
        if max_calls is not None and not max_calls >= 0:
            raise ValueError(f"max_calls={max_calls}, expected 0 or more")
        self.tools = make_tools(tools)
        self.max_turns, self.max_calls, self.timeout_s = max_turns, max_calls, timeout_s
        self.observation_limit, self.prompt_limit = observation_limit, prompt_limit
        self.head = react_format.write_instructions(self.tools) if instructions is None else instructions
        if data is not None and kinds is not None:
            raise ValueError("kinds: expected without `data`, for the questions about a made-up country")
        tool_kinds = self._choose_kinds(tools, kinds) if data is None else ()
        train, test = find_tasks(
            data, test_data, held_out, read_math, lambda split: _questions_of_split(tool_kinds, split)
        )
        super().__init__([agent], train, test, seed=seed, cost=cost, reward=reward)
        longest = len(self._prompt(max((*train, *test), key=lambda task: len(task.prompt)), [], 0))
        if longest + observation_limit > prompt_limit:
            raise ValueError(
                f"prompt_limit={prompt_limit}: the longest prompt without turns has {longest} characters; expected room "
                f"for that and an observation of {observation_limit}"
            )

    @override
    def begin(self) -> None:
        self._turns_so_far: list[ReactTurn] = []
        self._calls = self._failed_actions = 0
        self._ask()

    @override
    def act(self, agent: str, text: str) -> None:
        response, result = self._respond(text, self._calls)
        ran = bool(result.tool) and not result.ends
        self._calls += ran
        self._failed_actions += bool(result.failure)
        self._turns_so_far.append(ReactTurn(response, result.observation))
        self.spend(agent, calls=ran, seconds=result.seconds)
        if not result.ends and len(self._turns_so_far) < self.max_turns:
            self._ask()
            return
        answer = result.observation if result.ends else ""
        right = result.ends and same_answer(answer, self.task.answer)
        counts = {"pass": right, "answered": result.ends, "calls": self._calls, "failed_actions": self._failed_actions}
        self.finish(right, self.pay(answer, {name: float(value) for name, value in counts.items()}))

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Return every turn of an expert in `count` episodes, tasks in the order that `seed` gives.

        In the made-up country the expert knows which calls lead to the answer, and makes them. For tasks of a file it
        thinks the task's solution, where there is one, and gives the answer: that teaches the format, not the tools.
        """
        demonstrations = []
        for index in range(count):
            task = self.train[task_index(len(self.train), seed, index)]
            turns: list[ReactTurn] = []
            for step in _plan(task):
                response = _write_response(step)
                demonstrations.append(
                    Demonstration(self.possible_agents[0], self._prompt(task, turns, len(turns)), response)
                )
                shortened, result = self._respond(response, len(turns))
                turns.append(ReactTurn(shortened, result.observation))
        return demonstrations

    def _respond(self, text: str, calls: int) -> tuple[str, CallResult]:
        """Run the call in a response after `calls` earlier ones and return the text for later prompts, and the result."""
        call = parse_call(text)
        tool = find_tool(self.tools, call.tool)
        if self.max_calls is not None and calls >= self.max_calls and tool is not None and not tool.ends:
            return call.text, CallResult(_NO_CALLS, "no_calls_left")
        return call.text, react_format.make_call(call, self.tools, self.timeout_s, self.observation_limit)

    def _ask(self) -> None:
        self.ask(self.possible_agents[0], self._prompt(self.task, self._turns_so_far, self._calls))

    def _prompt(self, task: Task, turns: Sequence[ReactTurn], calls: int) -> str:
        remaining = f"{self.max_turns - len(turns)} turns"
        if self.max_calls is not None:
            remaining += f" and {self.max_calls - calls} tool calls"
        return write_transcript(self.head, task.prompt, turns, self.prompt_limit, f"({remaining} left)\n")

    def _choose_kinds(self, tools: object, kinds: Sequence[str] | None) -> tuple[str, ...]:
        """Return the kinds of made-up questions that are asked.

        Raises ValueError where the tools or the limits do not suffice.
        """
        unknown = [kind for kind in kinds or () if kind not in QUESTION_KINDS]
        if unknown:
            raise ValueError(f"kinds: {unknown[0]!r}, expected some of {', '.join(QUESTION_KINDS)}")
        usable = set(self.tools)
        options = tools.get(SEARCH_TOOL) if isinstance(tools, Mapping) else None
        if (options or {}).get("corpus") != TOWNS_CORPUS:
            usable.discard(SEARCH_TOOL)
        plans = {question.kind: question.plan for question in questions()}
        max_calls = self.max_turns if self.max_calls is None else self.max_calls
        possible = [
            kind
            for kind, plan in plans.items()
            if {step.tool for step in plan} <= usable and len(plan) <= self.max_turns and len(plan) - 1 <= max_calls
        ]
        used = possible if kinds is None else kinds
        hopeless = [kind for kind in used if kind not in possible]
        if hopeless or not used:
            which = f"{hopeless[0]} cannot" if hopeless else "none can"
            raise ValueError(
                f"kinds: {which} be answered with these tools, max_turns and max_calls; expected `data`, or "
                f"code_interpreter and {SEARCH_TOOL} with corpus: {TOWNS_CORPUS}"
            )
        return tuple(used)


def _questions_of_split(kinds: Sequence[str], split: str) -> tuple[CountryQuestion, ...]:
    return tuple(question for question in questions() if question.kind in kinds and question.test == (split == "test"))


def _plan(task: Any) -> tuple[QuestionStep, ...]:
    if isinstance(task, MathTask):
        return (QuestionStep(task.solution or "I know this.", "answer", {"answer": task.answer}),)
    plan: tuple[QuestionStep, ...] = task.plan
    return plan


def _write_response(step: QuestionStep) -> str:
    """Return a step as `parse_call` reads it."""
    return f"Thought: {step.thought}\nAction: {step.tool}\nInput: {json.dumps(step.arguments)}"
