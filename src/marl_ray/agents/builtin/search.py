"""The search tool: Serper's Google search over HTTP, or BM25 over a file of documents.

Both answer with the same kind of response. Serper's API: POST https://google.serper.dev/search, header X-API-KEY, body
{"q": ..., "num": 10}.
"""

import functools
import itertools
import logging
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from marl_ray.agents.errors import ToolError
from marl_ray.agents.made_up_country import documents
from marl_ray.config.mistakes.wording import first_mistake
from marl_ray.deadlines.http_client import DeadlineClient
from marl_ray.deadlines.json_posts import post_json
from marl_ray.errors import MarlRayError
from marl_ray.stored_files.stored_texts import StoredTexts

log = logging.getLogger(__name__)

SERPER_URL = "https://google.serper.dev"
KEY_VARIABLE = "SERPER_API_KEY"
REQUESTED_RESULTS = 10
"""Number of results that a query asks for, however many of them are shown."""
_MAX_RESPONSE_BYTES = 1 << 20
"""Maximum size of a response; one of ten results has a few kilobytes."""
_MAX_QUERY_LENGTH = 2000
"""Characters of a query that are sent, the first ones: an agent's query may have any length."""
_RETRIED_STATUSES = {408, 425, 429, 500, 502, 503, 504}
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 5.0
"""Seconds before the first repeated request, and at most; each pause is twice as long as the one before."""
_CACHE_WAIT_S = 5.0
"""Seconds to wait, at most, for another process that writes to the cache: less than an agent's call may take."""
_KEY_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_LOCAL_HOSTS = {"127.0.0.1", "::1", "localhost"}


class OrganicResult(BaseModel):
    """One result of a search."""

    title: str = ""
    snippet: str = ""
    link: str = ""


class AnswerBox(BaseModel):
    """The answer that stands above the results."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    answer: str | None = None
    snippet: str | None = None


class SearchResponse(BaseModel):
    """The part of a response that is read; a response holds much more."""

    answer_box: AnswerBox | None = Field(None, alias="answerBox")
    organic: list[OrganicResult] = []

    def text(self, results: int) -> str:
        """Return the answer, else its snippet, else the first results, numbered."""
        box = self.answer_box or AnswerBox()
        if box.answer or box.snippet:
            return box.answer or box.snippet or ""
        lines = (f"{i}. {item.title}: {item.snippet}" for i, item in enumerate(self.organic[:results], 1))
        return "\n".join(lines) or "No results."


Backend = Callable[[str, float], SearchResponse]
"""Function from a query and a deadline (of `time.monotonic`) to a response. Raises ToolError."""


class Serper:
    """Client of Serper's API or one like it; safe to use from several threads."""

    def __init__(self, key: str, base_url: str = SERPER_URL, cache: StoredTexts | None = None):
        self._key, self._cache = key, cache
        self._url = f"{base_url.rstrip('/')}/search"
        self._client = DeadlineClient(headers={"X-API-KEY": key})

    def __call__(self, query: str, deadline: float) -> SearchResponse:
        """Return the response to a query, from the cache if it has one, else from the service by `deadline`.

        Raises ToolError for a service that refuses, answers late or is malformed; only good responses are stored.
        """
        question = f"{self._url} {REQUESTED_RESULTS} {query}"
        stored = None if self._cache is None else self._cache.get(question)
        response = None if stored is None else _parse_response(stored.encode())
        if response is not None:
            return response
        response = _parse_response(self._fetch(query, deadline))
        if response is None:
            raise ToolError("Search failed: the service's response is malformed.")
        # A service that echoes the key must not put it into a prompt or the cache.
        stored_text = response.model_dump_json(by_alias=True).replace(self._key, "[key]")
        if self._cache is not None:
            self._cache.put(question, stored_text)
        return SearchResponse.model_validate_json(stored_text)

    def _fetch(self, query: str, deadline: float) -> bytes:
        """Return the body of a response with status 200.

        The request is repeated with growing pauses while there is time.
        """
        for attempt in itertools.count():
            pause = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                sent = {"q": query, "num": REQUESTED_RESULTS}
                status, body, wait_s = post_json(self._client, self._url, sent, deadline, _MAX_RESPONSE_BYTES)
            except httpx.RequestError as error:
                failure = type(error).__name__  # its text may name hosts and proxies
            else:
                if len(body) > _MAX_RESPONSE_BYTES:
                    raise ToolError("Search failed: the service's response is too large.")
                if status == 200:
                    return body
                failure = f"HTTP {status}"
                if status not in _RETRIED_STATUSES:
                    log.warning("search: %s answered %s; is %s right?", self._url, failure, KEY_VARIABLE)
                    raise ToolError(f"Search failed: {failure}.")
                pause = max(pause, wait_s)
            if time.monotonic() + pause >= deadline:
                raise ToolError(f"Search failed: {failure}.")
            time.sleep(pause)
        raise AssertionError("itertools.count ends")


class Document(BaseModel):
    """A line of a corpus."""

    title: str = ""
    text: str
    link: str = ""


class Corpus:
    """BM25 over documents held in memory (Robertson and Zaragoza 2009, eq. 3.15, with k1 = 1.5 and b = 0.75).

    The inverse document frequency is log(1 + (N - n + 0.5) / (n + 0.5)), which is never negative.
    """

    def __init__(self, documents: Sequence[Document], k1: float = 1.5, b: float = 0.75):
        self._documents = list(documents)
        postings: dict[str, list[tuple[int, int]]] = {}
        lengths = np.zeros(len(documents))
        for index, document in enumerate(documents):
            words = _split_words(f"{document.title} {document.text}")
            lengths[index] = len(words)
            for word, count in Counter(words).items():
                postings.setdefault(word, []).append((index, count))
        norm = k1 * (1 - b + b * lengths / max(lengths.mean() if len(lengths) else 1.0, 1.0))
        self._weights: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word, pairs in postings.items():
            where, counts = np.array(pairs).T
            rarity = np.log1p((len(documents) - len(pairs) + 0.5) / (len(pairs) + 0.5))
            self._weights[word] = where, rarity * counts * (k1 + 1) / (counts + norm[where])

    @classmethod
    def read(cls, path: str) -> "Corpus":
        """Read a JSONL file of `title` (optional), `text` and `link` (optional).

        Raises MarlRayError naming the file and line.
        """
        parsed, number = [], 0
        try:
            with open(path, "rb") as lines:
                for line in lines:
                    number += 1
                    if line.strip():
                        parsed.append(Document.model_validate_json(line))
        except OSError as error:
            raise MarlRayError(f"corpus: {path}: {error.strerror}") from error
        except ValidationError as error:
            raise MarlRayError(f"corpus: {path}, line {number}: {first_mistake(error, model=Document)}") from error
        if not parsed:
            raise MarlRayError(f"corpus: {path} has no documents")
        return cls(parsed)

    def scores(self, query: str) -> np.ndarray:
        """Return the scores (N,) float64 of the documents for the query, 0 for one without any of its words."""
        scores = np.zeros(len(self._documents))
        for word in _split_words(query):
            if word in self._weights:
                where, weights = self._weights[word]
                scores[where] += weights
        return scores

    def __call__(self, query: str, deadline: float) -> SearchResponse:
        """Return the best documents of this query, those without any of its words left out. The `deadline` is not read."""
        scores = self.scores(query)
        best = [i for i in np.argsort(-scores, kind="stable")[:REQUESTED_RESULTS].tolist() if scores[i] > 0]
        best_documents = (self._documents[i] for i in best)
        return SearchResponse(
            organic=[OrganicResult(title=d.title, snippet=d.text, link=d.link) for d in best_documents]
        )


class GoogleSearchSerper:
    """Searches the web and returns the answer or the first results."""

    name = "google_search_serper"

    def __init__(
        self,
        corpus: str | None = None,
        base_url: str = SERPER_URL,
        key_file: str | None = None,
        results: int = 3,
        cache: str | None = None,
        cache_entries: int = 10_000,
    ):
        """Raise MarlRayError naming the option, or the key if there is none.

        corpus: a JSONL file to search instead of the web, or `towns`, the country of `marl_ray.agents.made_up_country`.
        base_url: Serper's address.
        key_file: the file of the key, which the variable SERPER_API_KEY holds otherwise.
        results: most results that an agent reads, 3.
        cache: a SQLite file that several processes may share; by default in memory.
        cache_entries: most responses in the cache, 10,000, of which the oldest are dropped.
        """
        if results < 1 or cache_entries < 1:
            raise MarlRayError("google_search_serper: expected results and cache_entries of at least 1")
        self.results = results
        self._ask = (
            _open_corpus(corpus)
            if corpus is not None
            else _open_serper(base_url, _read_key(key_file), cache, cache_entries)
        )

    def __call__(self, query: str, deadline: float) -> str:
        """Return the first results as text. Raises ToolError."""
        if not query.strip():
            raise ToolError("The query is empty.")
        # A little earlier than the caller, so that it learns what went wrong.
        earlier_deadline = deadline - 0.1 * max(0.0, deadline - time.monotonic())
        return self._ask(query[:_MAX_QUERY_LENGTH], earlier_deadline).text(self.results)


@functools.lru_cache(maxsize=8)
def _open_corpus(path: str) -> Backend:
    """Return the corpus at `path`, shared by the environments of a process."""
    return Corpus([Document(title=t, text=s) for t, s in documents()]) if path == "towns" else Corpus.read(path)


@functools.lru_cache(maxsize=8)
def _open_serper(base_url: str, key: str, cache: str | None, entries: int) -> Backend:
    """Return a client of Serper, shared by the environments of a process, with its connections and its cache."""
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError) as error:
        raise MarlRayError(f"base_url: {base_url!r} is no URL") from error
    if url.scheme != "https" and not (url.scheme == "http" and url.host in _LOCAL_HOSTS):
        raise MarlRayError(f"base_url: {base_url!r}; expected https, for the key travels with every request")
    return Serper(key, base_url, StoredTexts(cache, entries, _CACHE_WAIT_S))


def _read_key(path: str | None) -> str:
    """Return the API key, from a file or the environment. Errors never show it."""
    if path is None:
        key, source = os.environ.get(KEY_VARIABLE, ""), f"the environment variable {KEY_VARIABLE}"
    else:
        try:
            key, source = Path(path).read_bytes().decode("ascii", "replace"), f"key_file {path}"
        except OSError as error:
            raise MarlRayError(f"google_search_serper: key_file {path}: {error.strerror}") from error
    key = key.strip()
    if not key:
        raise MarlRayError(f"google_search_serper: needs a key in {source}, or `corpus` to search a file instead")
    if not _KEY_PATTERN.fullmatch(key):
        raise MarlRayError(f"google_search_serper: {source} holds no key; expected letters, digits and - _ . alone")
    return key


def _parse_response(body: bytes) -> SearchResponse | None:
    """Parse a response; return None if it has another schema.

    The library's own error could quote a key that stands in the body.
    """
    try:
        return SearchResponse.model_validate_json(body)
    except ValidationError:
        return None


def _split_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
