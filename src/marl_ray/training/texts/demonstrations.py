"""Read and encode demonstrations for language models.

Demonstrations come from a file or an environment, and are encoded as a policy reads and writes.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pydantic import BaseModel, ConfigDict

from marl_ray.config import RunConfig, WarmStartConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.prompting.prompts import check_fits, encode_reply, uses_template
from marl_ray.policies.prompting.protocol import Tokenizer
from marl_ray.policies.prompting.turn_ends import turn_begin, turn_end
from marl_ray.stored_files.record_files import read_bytes, read_record, read_records

if TYPE_CHECKING:
    from pettingzoo import AECEnv


DEFAULT_EPISODES = 2_000
"""Number of episodes that an environment demonstrates where `warm_start.count` is not given."""


class DemonstrationRecord(BaseModel):
    """One demonstration of a file."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompt: str
    response: str
    agent: str | None = None


class TextExample(NamedTuple):
    """One prompt with a response to learn from, as text."""

    where: str
    """Its file and line, for errors."""
    prompt: str
    response: str


class EncodedExample(NamedTuple):
    """One prompt with a response to learn from, as token ids."""

    prompt: list[int]
    response: list[int]
    """The end token included."""

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the response."""
        return len(self.prompt) + len(self.response)


def read_demonstrations(
    config: RunConfig, env: "AECEnv", agents: Mapping[str, Sequence[str]], max_count: int | None = None
) -> dict[str, list[TextExample]]:
    """Read the demonstrations of a warm start for each trained policy, given `agents` (policy -> its agents).

    An environment plays at most `max_count` episodes. Raises MarlRayError naming the file and the line, or a policy without
    any.
    """
    settings = cast(WarmStartConfig, config.warm_start)
    if settings.data == "environment":
        demonstrations = getattr(env.unwrapped, "demonstrations", None)
        if not callable(demonstrations):
            raise MarlRayError(f"warm_start.data=environment: {config.env.id} has no `demonstrations(count, seed)`")
        count = settings.count or DEFAULT_EPISODES
        made = demonstrations(count if max_count is None else min(count, max_count), config.seed)
        pairs = [
            (demonstration.agent, TextExample(f"demonstration {i}", demonstration.prompt, demonstration.response))
            for i, demonstration in enumerate(made)
        ]
    else:
        pairs = _read_file(settings.data, [agent for members in agents.values() for agent in members])[: settings.count]
    table = {agent: name for name, members in agents.items() for agent in members}
    examples_of: dict[str, list[TextExample]] = {name: [] for name in agents if not config.team[name].frozen}
    for agent, example in pairs:
        if agent not in table:
            raise MarlRayError(f"{example.where}: agent {agent!r} is not one of {', '.join(table)}")
        if table[agent] in examples_of:
            examples_of[table[agent]].append(example)
    for name, examples in examples_of.items():
        if not examples:
            raise MarlRayError(f"warm_start.data: {settings.data} has no demonstration for policy {name!r}")
    return examples_of


def _read_file(path: str, agents: Sequence[str]) -> list[tuple[str, TextExample]]:
    """Return each demonstration of a file with its agent. Raises MarlRayError naming the file and the line."""
    pairs = []
    for row in read_records(path, read_bytes(path)):
        line = read_record(DemonstrationRecord, row)
        if line.agent is None and len(agents) > 1:
            raise MarlRayError(f"{row.where}: agent: expected one of {', '.join(agents)}")
        pairs.append((line.agent or agents[0], TextExample(row.where, line.prompt, line.response)))
    return pairs


def encode_examples(
    demonstrations: Sequence[TextExample], lm: Any, tokenizer: Tokenizer, config: RunConfig, name: str
) -> list[EncodedExample]:
    """Encode demonstrations as the policy reads prompts and writes responses.

    The function reads only the end tokens of `lm`. Raises MarlRayError where one is too long.
    """
    policy = config.team[name]
    assert policy.model is not None
    max_tokens, examples = policy.generation.max_tokens, []
    # Without a chat template the tokenizer's end token ends a turn.
    chats = uses_template(tokenizer, policy.model.chat)
    before = turn_begin(tokenizer) if chats else ""
    between, end = turn_end(lm, tokenizer) if chats else ("", tokenizer.eos_token_id)
    for demonstration in demonstrations:
        prompt, reply = encode_reply(
            tokenizer, demonstration.prompt, f"{before}{demonstration.response}{between}", policy.model.chat
        )
        response = [*reply, end]
        if len(response) > max_tokens:
            raise MarlRayError(
                f"{demonstration.where}: response of {len(response)} tokens, but "
                f"team.{name}.generation.max_tokens={max_tokens}"
            )
        check_fits(prompt, max_tokens, policy.model.context, demonstration.where)
        examples.append(EncodedExample(prompt, response))
    return examples
