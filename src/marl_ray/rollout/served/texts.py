"""Read texts that were served, as `marl-ray export` writes them.

One row is one response, with the outcome of its unit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from marl_ray.config.run.keys import DECISIONS_SCHEME
from marl_ray.errors import MarlRayError
from marl_ray.policies.prompting.protocol import Tokenizer
from marl_ray.rollout.served.parquet_rows import read_tables

COLUMNS: dict[str, pa.DataType] = {
    "experiment": pa.string(),
    "unit": pa.string(),
    "agent": pa.string(),
    "sampled": pa.bool_(),
    "outcome": pa.float64(),
    "prompt_ids": pa.list_(pa.int64()),
    "text": pa.string(),
    "ids": pa.list_(pa.int64()),
    "log_probs": pa.list_(pa.float64()),
    "finish": pa.string(),
    "temperature": pa.float64(),
    "asked": pa.list_(pa.string()),
    "at": pa.float64(),
}
"""The columns that are read; a file may have more."""
TOKEN_ID_LIMIT = 1 << 31
"""Ids of tokens are below this number."""
PROBED_RESPONSES = 16
"""Number of responses that a tokenizer must decode to the served texts before it counts as the one that wrote them."""
LOG_PROB_ROUNDING = 1e-4
"""Excess over 0, in nats, that rounding may give the log-probability of a token."""


@dataclass(frozen=True, kw_only=True)
class ServedText:
    """One response."""

    where: str
    """File and row, for errors."""
    unit: str
    """`experiment/unit`."""
    agent: str
    sampled: bool
    """True if it was drawn from the model's full distribution; then `log_probs` are those of the draw."""
    outcome: float
    """The outcome of its unit."""
    prompt_ids: np.ndarray
    """(P,) int32."""
    ids: np.ndarray
    """(T,) int32, T at least 1."""
    log_probs: np.ndarray
    """(T,) float32."""
    text: str
    """The text that the client got."""
    finish: str
    """`stop`, `length`, or `broken_off` if it was broken off."""
    temperature: float | None
    """The temperature in force."""
    chosen_settings: frozenset[str]
    """Names of the settings that the request itself chose."""
    at: float
    """Time at which the response ended, in seconds since 1970."""


def exported_file(data: str) -> str:
    """Return the Parquet file of `decisions://FOLDER/EXPERIMENT`.

    FOLDER is that of `marl-ray export --out`: a local folder or a URI (`decisions://s3://bucket/prefix/EXPERIMENT`).
    Raises MarlRayError if FOLDER or EXPERIMENT is missing.
    """
    place, mark, options = data.removeprefix(DECISIONS_SCHEME).partition("?")
    folder, _, experiment = place.rpartition("/")
    if not folder or not experiment:
        raise MarlRayError(f"data: {data!r}, expected decisions://FOLDER/EXPERIMENT")
    return f"{folder}/{experiment}.parquet{mark}{options}"


def read_served(path: str) -> list[ServedText]:
    """Read the responses of a file, in order.

    `path` may also be a folder, of which all `*.parquet` are read, those of the folders in it too, or a URI. A response
    that stands in several files of a folder, as overlapping exports write it, is read once. Responses of arms that
    report no tokens are left out. Raises MarlRayError naming the file, the row (from 0) and the column of what does not
    fit, or if nothing is left.
    """
    texts: list[ServedText] = []
    file_of_response: dict[tuple[str, str, float, bytes], str] = {}
    for file, begin, table in read_tables(path, COLUMNS):
        for response in _read_responses(file, begin, table):
            # The turn is not part of the key: an export before all of the log has arrived numbers turns differently.
            key = (response.unit, response.agent, response.at, response.ids.tobytes())
            if file_of_response.setdefault(key, file) == file:
                texts.append(response)
    if not texts:
        raise MarlRayError(f"{path}: expected at least one response with its tokens")
    _check_outcomes(texts)
    return texts


def _read_responses(file: str, begin: int, table: pa.Table) -> Iterator[ServedText]:
    """Yield the responses of a row group, whose first row has the number `begin` in the file."""
    for number, row in enumerate(table.to_pylist(), begin):
        where = f"{file}: row {number}"
        for column, value in row.items():
            if value is None and column != "temperature":
                raise MarlRayError(f"{where}, column {column}: expected a value, not null")
        if not row["ids"] or not row["prompt_ids"]:
            continue
        log_probs = np.array(row["log_probs"], np.float32)
        tokens = {column: _are_tokens(row[column]) for column in ("prompt_ids", "ids")}
        good = {
            **{column: (fits, "ids of tokens, from 0 on") for column, fits in tokens.items()},
            "outcome": (np.isfinite(row["outcome"]), "a finite number"),
            "log_probs": (
                log_probs.shape == (len(row["ids"]),)
                and bool((log_probs < LOG_PROB_ROUNDING).all() and np.isfinite(log_probs).all()),
                f"{len(row['ids'])} logarithms of probabilities, one for each of ids",
            ),
        }
        for column, (fits, expected) in good.items():
            if not fits:
                raise MarlRayError(f"{where}, column {column}: expected {expected}")
        yield ServedText(
            where=where,
            unit=f"{row['experiment']}/{row['unit']}",
            agent=row["agent"],
            sampled=row["sampled"],
            outcome=row["outcome"],
            prompt_ids=np.array(row["prompt_ids"], np.int32),
            ids=np.array(row["ids"], np.int32),
            log_probs=log_probs,
            text=row["text"],
            finish=row["finish"],
            temperature=row["temperature"],
            chosen_settings=frozenset(row["asked"]),
            at=row["at"],
        )


def _are_tokens(numbers: Sequence[int | None]) -> bool:
    return all(number is not None and 0 <= number < TOKEN_ID_LIMIT for number in numbers)


def _check_outcomes(served: Sequence[ServedText]) -> None:
    outcomes: dict[str, float] = {}
    for response in served:
        if outcomes.setdefault(response.unit, response.outcome) != response.outcome:
            raise MarlRayError(f"{response.where}, column outcome: expected the same outcome in all rows of a unit")


def group_by_policy(served: Sequence[ServedText], agents: Mapping[str, str]) -> dict[str, list[ServedText]]:
    """Group responses by the policy that plays their agent.

    `agents` are agent -> policy. Raises MarlRayError for an agent without a policy.
    """
    result: dict[str, list[ServedText]] = {}
    for response in served:
        if response.agent not in agents:
            raise MarlRayError(f"{response.where}, column agent: {response.agent!r} is not one of {', '.join(agents)}")
        result.setdefault(agents[response.agent], []).append(response)
    return result


def check_readable(
    name: str, tokenizer: Tokenizer, vocabulary: int, context: int, served: Sequence[ServedText]
) -> None:
    """Raise MarlRayError if policy `name` cannot have written a response.

    The policy cannot if the response is too long or has tokens of another tokenizer.
    """
    for number, response in enumerate(served):
        length = len(response.prompt_ids) + len(response.ids)
        if length > context:
            raise MarlRayError(f"{response.where}: {length} tokens, but policy {name!r} has a context of {context}")
        largest = int(max(response.prompt_ids.max(), response.ids.max()))
        smallest = int(min(response.prompt_ids.min(), response.ids.min()))
        fits = smallest >= 0 and largest < vocabulary
        if fits and number < PROBED_RESPONSES:
            read = tokenizer.decode(response.ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            fits = read.startswith(response.text)  # the text may lack a stop string that the tokens have
        if not fits:
            raise MarlRayError(
                f"{response.where}, column ids: policy {name!r} has another tokenizer than the arm that wrote it"
            )
