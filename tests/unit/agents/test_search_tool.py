"""The search tool against a real HTTP server on this machine, and BM25 against its formula written out."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import pytest
from servers.dripping_server import SlowHeadersHandler, dripping
from servers.http_server import serving_http

from marl_ray.agents.builtin.search import KEY_VARIABLE, REQUESTED_RESULTS, Corpus, Document, GoogleSearchSerper
from marl_ray.agents.errors import ToolError
from marl_ray.agents.made_up_country import documents, questions
from marl_ray.agents.tools import make_tools
from marl_ray.errors import MarlRayError

KEY = "secret-key-0123456789"
ORGANIC = [{"title": f"T{i}", "link": f"http://x/{i}", "snippet": f"s{i}", "position": i} for i in range(1, 6)]


@dataclass
class Service:
    """Answers of the server, one after the other (the last for good), and the requests that it got."""

    replies: list[tuple[int, object]]
    url: str = ""
    requests: list[tuple[str, dict[str, str], dict[str, object]]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    drip_s: float = 0.0


@contextmanager
def serving(*replies: tuple[int, object]) -> Iterator[Service]:
    service = Service(list(replies))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            service.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            status, reply = service.replies[0] if len(service.replies) == 1 else service.replies.pop(0)
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            try:
                self.send_response(status)
                for name, value in service.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for i in range(0, len(data), 1 if service.drip_s else len(data)):
                    self.wfile.write(data[i : i + 1] if service.drip_s else data)
                    self.wfile.flush()
                    time.sleep(service.drip_s)
            except OSError:
                pass  # the client had enough

        def log_message(self, *_: object) -> None: ...

    with serving_http(Handler) as service.url:
        yield service


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def ask(search: Callable[[str, float], str], query: str = "what", seconds: float = 5.0) -> str:
    return search(query, time.monotonic() + seconds)


def test_the_request_is_serpers():
    with serving((200, {"organic": ORGANIC})) as service:
        assert ask(GoogleSearchSerper(base_url=service.url), "caf\u00e9?") == "1. T1: s1\n2. T2: s2\n3. T3: s3"
        [(path, headers, body)] = service.requests
    assert (path, body) == ("/search", {"q": "caf\u00e9?", "num": REQUESTED_RESULTS})
    assert headers["x-api-key"] == KEY
    assert headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ({"answerBox": {"answer": "42", "snippet": "no"}, "organic": ORGANIC}, "42"),
        ({"answerBox": {"snippet": "a snippet", "title": "t"}, "organic": ORGANIC}, "a snippet"),
        ({"answerBox": {"answer": 42.5}}, "42.5"),
        ({"answerBox": {"title": "only"}, "organic": ORGANIC[:1], "credits": 1}, "1. T1: s1"),
        ({"organic": [{"title": "no snippet", "position": 1}]}, "1. no snippet: "),
        ({"searchParameters": {"q": "x"}}, "No results."),
    ],
)
def test_the_answer_box_comes_first(reply, text):
    with serving((200, reply)) as service:
        assert ask(GoogleSearchSerper(base_url=service.url)) == text


@pytest.mark.parametrize(
    "reply", [b"", b"<html>", b"[1]", b'{"organic": 5}', b'{"organic": [{"title": 1}]}', b"\xff", b"[" * 100_000]
)
def test_a_malformed_response_is_told(reply):
    with (
        serving((200, reply)) as service,
        pytest.raises(ToolError, match=r"^Search failed: the service's response is malformed\.$"),
    ):
        ask(GoogleSearchSerper(base_url=service.url))


def test_what_passes_is_tried_again():
    with serving((503, {}), (429, {}), (200, {"answerBox": {"answer": "yes"}})) as service:
        assert ask(GoogleSearchSerper(base_url=service.url)) == "yes"
        assert len(service.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 302])
def test_what_does_not_pass_is_told_at_once(status):
    with serving((status, {"message": f"Unauthorized {KEY}"})) as service:
        with pytest.raises(ToolError, match=f"^Search failed: HTTP {status}.$"):
            ask(GoogleSearchSerper(base_url=service.url))
        assert len(service.requests) == 1


def test_no_wait_passes_the_deadline():
    with serving((503, {})) as service:
        service.headers = {"retry-after": "3600"}
        with pytest.raises(ToolError, match=r"^Search failed: HTTP 503\.$"):
            ask(GoogleSearchSerper(base_url=service.url))
    with serving((200, {"answerBox": {"answer": 500 * "x"}})) as service:
        service.drip_s = 0.05
        with pytest.raises(ToolError, match=r"^Search failed: ReadTimeout\.$"):
            ask(GoogleSearchSerper(base_url=service.url), seconds=0.2)
    began = time.monotonic()
    with dripping(SlowHeadersHandler) as url, pytest.raises(ToolError, match=r"^Search failed: ReadTimeout\.$"):
        ask(GoogleSearchSerper(base_url=url), seconds=0.2)
    assert time.monotonic() - began < SlowHeadersHandler.answer_s / 2
    with pytest.raises(ToolError, match=r"^Search failed: (ReadTimeout|Connect\w+)\.$"):
        ask(GoogleSearchSerper(base_url="http://127.0.0.1:9"), seconds=0.2)


def test_a_response_may_not_be_huge():
    with (
        serving((200, b" " * (2 << 20))) as service,
        pytest.raises(ToolError, match=r"^Search failed: the service's response is too large\.$"),
    ):
        ask(GoogleSearchSerper(base_url=service.url))


def test_a_question_is_asked_once(tmp_path):
    path = str(tmp_path / "cache.db")
    with serving(
        (500, {}), (200, {"answerBox": {"answer": "one"}}), (200, {"answerBox": {"answer": "two"}})
    ) as service:
        search = GoogleSearchSerper(base_url=service.url, cache=path)
        assert [ask(search, "a"), ask(search, "a"), ask(search, "b"), ask(search, "a")] == ["one", "one", "two", "one"]
        assert len(service.requests) == 3
        # Another process would open the file anew; other options make another client of it.
        assert ask(GoogleSearchSerper(base_url=service.url, cache=path, cache_entries=7), "b") == "two"
        assert len(service.requests) == 3


def test_many_threads_may_search(tmp_path):
    with serving((200, {"answerBox": {"answer": "yes"}})) as service, ThreadPoolExecutor(8) as threads:
        search = GoogleSearchSerper(base_url=service.url, cache=str(tmp_path / "c.db"), cache_entries=5)
        assert set(threads.map(lambda i: ask(search, str(i % 9), 30), range(60))) == {"yes"}


def test_the_key_is_nowhere(tmp_path, caplog, capfd):
    for name in ("", "httpx", "httpcore"):
        caplog.set_level(logging.DEBUG, logger=name)
    path = tmp_path / "cache.db"
    echo = {"answerBox": {"answer": f"your key is {KEY}"}, "organic": [{"title": KEY, "snippet": KEY}]}
    escaped = json.dumps(echo).replace("secret", "\\u0073ecret").encode()
    seen = []
    with serving((200, echo), (200, escaped), (401, {"message": KEY}), (200, KEY.encode())) as service:
        tools = make_tools({"google_search_serper": {"base_url": service.url, "cache": str(path)}})
        for i in range(4):
            try:
                seen.append(tools["google_search_serper"].call({"query": str(i)}, time.monotonic() + 60))
            except ToolError as error:
                seen.append(f"{error!r} {error.__cause__!r} {error.__context__!r}")
        assert len(service.requests) == 4
    seen += [repr(tools), caplog.text, *capfd.readouterr(), path.read_bytes().decode("latin-1")]
    assert seen[0] == seen[1] == "your key is [key]"
    assert "HTTP 401" in seen[2]
    assert "HTTP Request" in caplog.text
    assert not [text for text in seen if KEY in text]


def test_where_the_key_comes_from(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text("from-a-file\n")
    with serving((200, {})) as service:
        ask(GoogleSearchSerper(base_url=service.url, key_file=str(file)))
        assert service.requests[0][1]["x-api-key"] == "from-a-file"
    for content in (b"two words", b"caf\xe9-secret", "d\u00e9j\u00e0".encode()):
        file.write_bytes(content)
        with pytest.raises(MarlRayError, match="holds no key") as error:
            GoogleSearchSerper(key_file=str(file))
        assert content.decode("latin-1") not in str(error.value)
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(MarlRayError, match=f"needs a key in the environment variable {KEY_VARIABLE}"):
        make_tools(["google_search_serper"])
    with pytest.raises(MarlRayError, match=r"key_file .*missing: No such file"):
        GoogleSearchSerper(key_file=str(tmp_path / "missing"))


@pytest.mark.parametrize("url", ["http://google.serper.dev", "ftp://127.0.0.1", "google.serper.dev", "http://[", 5])
def test_the_key_travels_encrypted_or_not_at_all(url):
    with pytest.raises(MarlRayError, match="base_url: "):
        GoogleSearchSerper(base_url=url)


TEXTS = ["the cat sat on the mat", "a dog", "the dog and the cat", "cat cat cat", "birds sing", "", "The CAT!"]


def test_bm25_is_its_formula():
    corpus = Corpus([Document(text=text) for text in TEXTS])
    docs = [text.lower().replace("!", "").split() for text in TEXTS]
    mean = sum(map(len, docs)) / len(docs)
    for query in ("cat", "the dog", "cat cat mat", "nothing", ""):
        expected = []
        for doc in docs:
            score = 0.0
            for word in query.split():
                n, tf = sum(word in other for other in docs), doc.count(word)
                idf = math.log(1 + (len(docs) - n + 0.5) / (n + 0.5))
                score += idf * tf * 2.5 / (tf + 1.5 * (0.25 + 0.75 * len(doc) / mean))
            expected.append(score)
        assert corpus.scores(query) == pytest.approx(expected)


def test_a_corpus_is_searched_like_the_web(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE)
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"title": f"D{i}", "text": text}) + "\n\n" for i, text in enumerate(TEXTS)))
    search = GoogleSearchSerper(corpus=str(path), results=2)
    assert ask(search, "dog") == "1. D1: a dog\n2. D2: the dog and the cat"
    assert ask(search, "whale \ud800") == "No results."
    with pytest.raises(ToolError, match=r"^The query is empty\.$"):
        ask(search, " ")
    for content, words in [
        ("", "has no documents"),
        ('{"text": "a"}\n{"title": "b"}\n', "line 2: missing key 'text'"),
        ('{"text"', "line 1: not JSON"),
    ]:
        other = tmp_path / f"{len(content)}.jsonl"
        other.write_text(content)
        with pytest.raises(MarlRayError, match=words):
            GoogleSearchSerper(corpus=str(other))
    with pytest.raises(MarlRayError, match=r"corpus: .*: No such file"):
        GoogleSearchSerper(corpus=str(tmp_path / "missing.jsonl"))
    with pytest.raises(MarlRayError, match=r"^google_search_serper: expected results and cache_entries of at least 1$"):
        GoogleSearchSerper(corpus="towns", results=0)


def test_the_made_up_country_answers_its_questions():
    search = GoogleSearchSerper(corpus="towns")
    assert len({title for title, _ in documents()}) == len(documents())
    assert len({question.prompt for question in questions()}) == len(questions())
    for question in questions():
        seen = [ask(search, step.arguments["query"]) for step in question.plan if step.tool == "google_search_serper"]
        shown = " ".join(seen)
        if question.kind == "difference":
            years = question.plan[-2].thought.removeprefix("I compute ").rstrip(".").split(" - ")
            assert int(years[0]) - int(years[1]) == int(question.answer) > 0
            assert all(year in shown for year in years)
        elif question.kind != "arithmetic":
            assert question.answer in shown
