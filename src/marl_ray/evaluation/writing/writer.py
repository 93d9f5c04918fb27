"""Write samples with language models: those of a bundle, or those that a run trains.

One policy reads a problem's prompt and answers once. A code team (trained on the environment `code_team`) plays that
environment on the problem: its public tests are those that the prompt shows, and its last program is the sample. A sample is
a function of (weights, seed, task id, number of the sample). The process and the batch do not change it.
"""

import copy
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from marl_ray.config.run.model import GenerationConfig
from marl_ray.deadlines.side_by_side import CallTimeoutError, run_side_by_side
from marl_ray.envs.text.code_team import GENERATOR, CodeTeam
from marl_ray.envs.text.tasks import StaticProgramTask
from marl_ray.errors import FieldError, MarlRayError
from marl_ray.evaluation.benchmarks import AnswerKind, Benchmark, Problem
from marl_ray.evaluation.options import WritingRequest
from marl_ray.evaluation.writing.authors import Author, WriterPolicies, authors_of_bundle, generation_of
from marl_ray.evaluation.writing.requests import PROMPT_FIELD, Job, Row
from marl_ray.json_types import JsonObject
from marl_ray.policies.engines.base import Engine, Prompt
from marl_ray.policies.prompting.prompts import PromptTooLongError, check_fits, encode_prompt, fit_prompt
from marl_ray.rollout.rng import EVALUATION_STREAMS, response_stream, task_number

CPU_BATCH, GPU_BATCH = 64, 512
"""Number of samples that are written at once; samples of an unfinished batch are lost with the process."""
THREADS = 32
"""Number of conversations whose environments take their turns at once; most of a turn is waiting for the sandbox."""
TURN_S = 600.0
"""Seconds that a turn of an environment may take."""
Turns = Generator[tuple[str, str], str | None, None]
"""A generator of turns, each as (agent, prompt). The generator is sent None at first, and then each response."""


@dataclass
class Conversation:
    """The conversation that produces one sample."""

    problem: Problem
    sample: int
    turns: Turns
    agent: str | None = None
    """Agent that is asked next; None when the conversation is over."""
    prompt: str = ""
    responses: list[tuple[str, str]] = field(default_factory=list)
    """Agents and their responses, in order."""
    tokens: int = 0
    has_ended: bool = True
    """True if the last response ended by itself."""
    is_shortened: bool = False
    """True if the middle of a prompt was left out because the prompt did not fit."""
    is_truncated: bool = False
    """True if the conversation is over because the next prompt is too long even when shortened."""

    def take_next_turn(self) -> None:
        """Hand over the last response and take the next turn.

        Raises MarlRayError naming the task whose environment failed.
        """
        if self.is_truncated:
            self.agent = None
            return
        try:
            self.agent, self.prompt = self.turns.send(self.responses[-1][1] if self.responses else None)
        except StopIteration:
            self.agent = None
        except MarlRayError as error:
            raise MarlRayError(f"{self.problem.task_id}: {error}") from error


class Writer:
    """Language models that answer the problems of a benchmark in this process."""

    def __init__(self, request: WritingRequest, benchmark: Benchmark, authors: WriterPolicies | None = None):
        """Choose the kind of answer, if the request does not. Without `authors` the request's bundle answers.

        A code team writes a `solution`, or an `output` if it was trained to write fenced blocks; a policy with a chat
        template writes an `output`; any other writes what the benchmark's definition says (`Benchmark.writes`).

        Raises FieldError naming the option that does not fit, or the policy that cannot answer.
        """
        self.request, self.benchmark = request, benchmark
        if request.num_samples < 1 or (request.greedy and request.num_samples > 1):
            expected = "1, since greedy samples are all the same" if request.greedy else "1 or more"
            raise FieldError("num_samples", f"expected {expected}, got {request.num_samples}")
        if request.prompt is not None and PROMPT_FIELD not in request.prompt:
            raise FieldError("prompt", f"expected {PROMPT_FIELD} in it, got {request.prompt!r}")
        self.authors = authors or authors_of_bundle(request.policy, request.tracking_uri)
        self.agents = list(self.authors.agents)
        self.author, self.team = self._choose_author()
        alone = self.authors.policies[self.authors.agents[self.author]]
        if self.team is not None:
            self.kind: AnswerKind = request.answer or ("output" if self.team.answer == "block" else "solution")
        elif _uses_chat_template(alone):
            self.kind = request.answer or "output"
        else:
            self.kind = request.answer or benchmark.writes
        playing = self.agents if self.team is not None and self.team.turns > 1 else [self.author]
        self.playing = list(dict.fromkeys(self.authors.agents[agent] for agent in playing))
        self.generations = {name: self._generation(self.authors.policies[name]) for name in self.playing}
        self._engines: dict[str, Engine] = {}

    def manifest(self, problems: Sequence[Problem]) -> JsonObject:
        """Return the manifest that `SampleWriter.manifest` describes."""
        self._check_fits(problems)
        request, team = self.request, self.team
        return {
            "bundle": self.authors.digest,
            "writer": self.author if team is None or team.turns == 1 else "team",
            "team": None if team is None else self.authors.env["kwargs"],
            "answer": self.kind,
            "prompt": PROMPT_FIELD if request.prompt is None and team is None else request.prompt,
            "num_samples": request.num_samples,
            "seed": request.seed,
            "greedy": request.greedy,
            "generation": {name: generation.model_dump(mode="json") for name, generation in self.generations.items()},
        }

    def write(self, jobs: Sequence[Job]) -> Iterator[list[Row]]:
        """Yield samples as `SampleWriter.write` does."""
        size = GPU_BATCH if torch.cuda.is_available() else CPU_BATCH
        yield from (self.rows(jobs[begin : begin + size]) for begin in range(0, len(jobs), size))

    def rows(self, jobs: Sequence[Job]) -> list[Row]:
        """Write the samples of some jobs in waves of one turn each and return them in the order of the jobs."""
        conversations = [Conversation(problem, sample, self.turns(problem)) for problem, sample in jobs]
        _take_next_turns(conversations)
        while waiting := [conversation for conversation in conversations if conversation.agent is not None]:
            for name in self.playing:
                self._answer(
                    name,
                    [conversation for conversation in waiting if self.authors.agents[conversation.agent or ""] == name],
                )
            _take_next_turns(waiting)
        return [self._row(conversation) for conversation in conversations]

    def _choose_author(self) -> tuple[str, CodeTeam | None]:
        """Return the agent whose response is the sample, and the environment that a code team plays."""
        agent, table = self.request.agent, self.authors.agents
        if agent is not None and agent not in table:
            raise FieldError("agent", f"expected one of {', '.join(table)}, got {agent!r}")
        programs = self.benchmark.writes != "output"
        if programs and _is_code_team(self.authors) and agent in (None, GENERATOR) and self.request.prompt is None:
            return GENERATOR, _make_team_env(self.authors.env["kwargs"], alone=agent is not None)
        if agent is None and len(set(table.values())) > 1:
            raise FieldError(
                "agent", f"expected one of {', '.join(table)}; only a code team without a prompt plays together"
            )
        return agent or self.agents[0], None

    def _generation(self, policy: Author) -> GenerationConfig:
        """Return the sampling options of the policy, whose completions also end at the benchmark's stop strings."""
        overrides = {"temperature": self.request.temperature, "max_tokens": self.request.max_tokens}
        return generation_of(policy, overrides, self.benchmark.stop if self.kind == "completion" else ())

    def turns(self, problem: Problem) -> Turns:
        """Return the prompts of a sample of the problem, one after another, each with its author."""
        if self.team is None:
            return _one_turn(self.author, (self.request.prompt or PROMPT_FIELD).replace(PROMPT_FIELD, problem.prompt))
        return _team_turns(copy.copy(self.team), problem)

    def _check_fits(self, problems: Sequence[Problem]) -> None:
        """Raise MarlRayError if a first prompt must be shortened, because it would pose another problem.

        The error names the longest one.
        """
        first: list[tuple[str, str, list[int]]] = []  # task id, policy and token ids
        for problem in problems:
            agent, text = self.turns(problem).send(None)
            name = self.authors.agents[agent]
            policy = self.authors.policies[name]
            try:
                ids = encode_prompt(policy.tokenizer, text, policy.config.chat)
            except FieldError as error:  # its field is the problem's prompt, and not an option of the request
                raise MarlRayError(f"{problem.task_id}: {error}") from error
            first.append((problem.task_id, name, ids))
        task_id, name, ids = max(first, key=lambda prompt: len(prompt[2]))
        max_tokens, context = self.generations[name].max_tokens, self.authors.policies[name].config.context
        try:
            check_fits(ids, max_tokens, context, f"{task_id}: prompt")
        except MarlRayError as error:
            raise MarlRayError(f"{error} (team.{name}.model.context when the policy is trained)") from error

    def _fit_prompt(self, name: str, text: str) -> tuple[tuple[int, ...], bool] | None:
        """Return the token ids of a prompt, and True if it was shortened as in training.

        Returns None if shortening is not enough.
        """
        policy = self.authors.policies[name]
        room = policy.config.context - self.generations[name].max_tokens
        try:
            ids, is_shortened = fit_prompt(policy.tokenizer, text, policy.config.chat, room)
        except PromptTooLongError:
            return None
        except FieldError as error:  # as in _check_fits
            raise MarlRayError(str(error)) from error
        return tuple(ids), is_shortened

    def _answer(self, name: str, conversations: Sequence[Conversation]) -> None:
        """Take one turn of each conversation by one policy, in one call of its engine."""
        policy = self.authors.policies[name]
        encoded = {}
        prompts = []
        answered = []
        for conversation in conversations:
            if conversation.prompt not in encoded:
                encoded[conversation.prompt] = self._fit_prompt(name, conversation.prompt)
            if (fitted := encoded[conversation.prompt]) is None:
                # The first prompt fits, but a team's later responses may make the next one too long.
                conversation.is_truncated = True
                continue
            conversation.is_shortened |= fitted[1]
            number = sum(agent == conversation.agent for agent, _ in conversation.responses)
            place = self.agents.index(conversation.agent or "")
            stream = response_stream(
                EVALUATION_STREAMS, task_number(conversation.problem.task_id), conversation.sample, 0, place, number
            )
            prompts.append(Prompt(fitted[0], stream, self.request.greedy))
            answered.append(conversation)
        if not prompts:
            return
        if name not in self._engines:
            self._engines[name] = self.authors.engine(name)
        completions = self._engines[name].generate(prompts, self.request.seed, self.generations[name])
        for conversation, completion in zip(answered, completions, strict=True):
            text = policy.tokenizer.decode(completion.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            conversation.responses.append((conversation.agent or "", text))
            conversation.tokens += len(completion.ids)
            conversation.has_ended = completion.ended

    def _row(self, conversation: Conversation) -> Row:
        raw = next(text for agent, text in reversed(conversation.responses) if agent == self.author)
        text = _text_before_stop(raw, self.benchmark.stop) if self.kind == "completion" else raw
        row: Row = {
            "what": "sample",
            "task_id": conversation.problem.task_id,
            "sample": conversation.sample,
            self.kind: text,
        }
        if len(conversation.responses) > 1 or text != raw:
            row["turns"] = conversation.responses
        return row | {
            "tokens": conversation.tokens,
            "ended": conversation.has_ended,
            "shortened": conversation.is_shortened,
            "truncated": conversation.is_truncated,
        }


def _one_turn(agent: str, prompt: str) -> Turns:
    yield agent, prompt


def _team_turns(env: CodeTeam, problem: Problem) -> Turns:
    """Yield the turns of an episode. The scoring tests the last program, so this function does not."""
    env.test = (StaticProgramTask(problem.task_id, problem.prompt, problem.visible_task),)
    env.reset(seed=0, options={"index": 0, "split": "test"})
    programs = 0
    while not env.terminations[env.agent_selection]:
        agent = env.agent_selection
        response = yield agent, env.observe(agent)
        programs += agent == GENERATOR
        if programs == env.turns:
            return
        env.step(response)


def _make_team_env(kwargs: JsonObject, alone: bool) -> CodeTeam:
    """Return the environment that the team was trained on, without its tasks."""
    options = {key: value for key, value in kwargs.items() if key not in ("data", "test_data", "held_out", "levels")}
    env = CodeTeam(**options | {"count": 1} | ({"turns": 1} if alone else {}))
    env.train, env.test = (), ()
    return env


def _is_code_team(authors: WriterPolicies) -> bool:
    return authors.env.get("id") == "code_team" and GENERATOR in authors.agents


def _uses_chat_template(policy: Author) -> bool:
    return policy.tokenizer.chat_template is not None if policy.config.chat is None else policy.config.chat


def _take_next_turns(conversations: Sequence[Conversation]) -> None:
    try:
        run_side_by_side([conversation.take_next_turn for conversation in conversations], THREADS, TURN_S)
    except CallTimeoutError as late:
        raise MarlRayError(f"{conversations[late.index].problem.task_id}: a turn took over {TURN_S:g} s") from late


def _text_before_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]
