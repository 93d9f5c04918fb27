"""Read the `data` of a run.

The data are texts that were served, with their outcomes, or preferred pairs, as blocks of responses.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
from pydantic import BaseModel, ConfigDict

from marl_ray.config import RunConfig
from marl_ray.config.run.keys import DECISIONS_SCHEME
from marl_ray.errors import MarlRayError
from marl_ray.policies.prompting.protocol import Tokenizer
from marl_ray.rollout.served.collector import ResponseBlock, ServedResponse
from marl_ray.rollout.served.texts import ServedText, check_readable, exported_file, group_by_policy, read_served
from marl_ray.stored_files.record_files import read_bytes, read_record, read_records
from marl_ray.training.texts.demonstrations import TextExample, encode_examples

MAX_GROUP_SIZE = 16
"""Maximum number of responses to one prompt that are compared with each other.

More would leave a batch with few prompts."""


class PolicyReader(NamedTuple):
    """The tokenizer and the model for which a policy's data are encoded.

    Only the end tokens and the vocabulary of `lm` are read.
    """

    lm: Any
    tokenizer: Tokenizer


class PreferredPair(BaseModel):
    """One line of a file of preferred pairs."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompt: str
    chosen: str
    rejected: str
    agent: str | None = None


def read_data(
    config: RunConfig, agents: Mapping[str, Sequence[str]], readers: Mapping[str, PolicyReader]
) -> dict[str, list[ResponseBlock]]:
    """Read the blocks of every policy that learns; every process reads the same blocks.

    `agents` are policy -> its agents. Raises MarlRayError naming the file and the line that does not fit, or a policy
    that has nothing to learn from.
    """
    path = cast(str, config.data)
    players = {agent: name for name, members in agents.items() for agent in members}
    trained = [name for name in agents if not config.team[name].frozen]
    if path.startswith(DECISIONS_SCHEME):
        served = group_by_policy(read_served(exported_file(path)), players)
        blocks_of = {name: _served_blocks(config, name, served.get(name, []), readers[name]) for name in trained}
    else:
        pairs = _read_pairs(path, players)
        blocks_of = {name: _encode_pairs(config, name, pairs.get(name, []), readers[name]) for name in trained}
    for name, blocks in blocks_of.items():
        spec = config.spec_of(name)
        if not any(len(block) > 1 for block in blocks) and (spec.pairs or spec.groups):
            needed = "two responses to one prompt" + (" with different outcomes" if spec.pairs else "")
            raise MarlRayError(
                f"data: {path} has nothing for {config.algorithm_of(name)} of policy {name!r}: expected {needed}"
                + ("" if spec.pairs else "; reinforce_pp compares over the whole batch")
            )
        if not blocks:
            raise MarlRayError(f"data: {path} has no response of policy {name!r} that was drawn from its distribution")
    return blocks_of


def _served_blocks(
    config: RunConfig, name: str, served: Sequence[ServedText], reader: PolicyReader
) -> list[ResponseBlock]:
    """Return the blocks of served texts, prompt by prompt.

    For an algorithm that learns from pairs they are pairs.
    """
    spec, model = config.spec_of(name), config.team[name].model
    assert model is not None
    vocabulary = reader.lm.get_input_embeddings().weight.shape[0]
    check_readable(name, reader.tokenizer, vocabulary, model.context, served)
    prompts: dict[tuple[str, bytes], list[ServedResponse]] = {}
    for text in served:
        # An importance ratio needs the probabilities with which a text was written; a preference does not.
        if spec.pairs or text.sampled:
            response = ServedResponse(
                text.agent, text.prompt_ids, text.ids, text.log_probs, text.outcome, text.finish == "stop"
            )
            prompts.setdefault((text.agent, text.prompt_ids.tobytes()), []).append(response)
    groups = prompts.values()
    if spec.pairs:
        return [pair for group in groups for pair in preferred_pairs(group)]
    return [block for group in groups for block in _divide_group(group, MAX_GROUP_SIZE if spec.groups else 1)]


def preferred_pairs(group: Sequence[ServedResponse]) -> list[ResponseBlock]:
    """Pair responses to one prompt that have different rewards, the better one first.

    The best is paired with the worst, the second with the second last and so on, so that no response is in two pairs.
    """
    ranked = sorted(group, key=lambda response: -response.reward)
    pairs = zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False)
    return [(better, worse) for better, worse in pairs if better.reward > worse.reward]


def _divide_group(group: Sequence[ServedResponse], size: int) -> list[ResponseBlock]:
    """Divide a group into parts of at most `size` responses, as even as possible."""
    parts = -(-len(group) // size)
    bounds = [len(group) * part // parts for part in range(parts + 1)]
    return [tuple(group[begin:end]) for begin, end in pairwise(bounds)]


def _read_pairs(path: str, players: Mapping[str, str]) -> dict[str, list[tuple[str, PreferredPair]]]:
    """Return policy -> its lines, each with its file and line for errors."""
    pairs_of: dict[str, list[tuple[str, PreferredPair]]] = {}
    for row in read_records(path, read_bytes(path)):
        pair = read_record(PreferredPair, row)
        agent = pair.agent or (next(iter(players)) if len(players) == 1 else "")
        if agent not in players:
            raise MarlRayError(f"{row.where}: agent: expected one of {', '.join(players)}")
        pairs_of.setdefault(players[agent], []).append((row.where, pair.model_copy(update={"agent": agent})))
    return pairs_of


def _encode_pairs(
    config: RunConfig, name: str, pairs: Sequence[tuple[str, PreferredPair]], reader: PolicyReader
) -> list[ResponseBlock]:
    """Return a block for each pair, the chosen response first."""
    responses = [
        TextExample(where, pair.prompt, text) for where, pair in pairs for text in (pair.chosen, pair.rejected)
    ]
    examples = encode_examples(responses, reader.lm, reader.tokenizer, config, name)
    blocks = []
    for number, (_, pair) in enumerate(pairs):
        rewarded = zip(examples[2 * number : 2 * number + 2], (1.0, 0.0), strict=True)
        blocks.append(tuple(_make_response(str(pair.agent), *example, reward) for example, reward in rewarded))
    return blocks


def _make_response(agent: str, prompt: Sequence[int], ids: Sequence[int], reward: float) -> ServedResponse:
    zeros = np.zeros(len(ids), np.float32)
    return ServedResponse(agent, np.array(prompt, np.int32), np.array(ids, np.int32), zeros, reward, True)
