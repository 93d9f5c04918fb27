"""Pages and docstrings name what is there: files, errors, modules, commands and their options."""

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from docs.pages import PAGES, ROOT, blocks, pages_before

import marl_ray
from marl_ray.api.teams import LoadedTeam
from marl_ray.extensions import POINTS

FOLDERS = ("src", "tests", "benchmarks", "jobs", "serve", "cluster", "docs", ".ci")
FILE = re.compile(r"`([\w./-]*\w\.py)`")
ELSEWHERE = re.compile(r"openai/human-eval's `execution\.py`|, not `my_env\.py`")
"""A file of another project, and one that a reader is told not to write."""
RAISES = re.compile(r"\b[Rr]aises?\s+((?:an?\s+)?`?[A-Z]\w+`?(?:(?:,|\s+or|\s+and|,\s+or)\s+(?:an?\s+)?`?[A-Z]\w+`?)*)")
CAMEL = re.compile(r"[A-Z]\w*[a-z]\w*[A-Z]\w*|\w+Error|\w+Exception")
CLASS = re.compile(r"^\s*class (\w+)(?:\(([^)]*)\))?:", re.MULTILINE)
IMPORTED = re.compile(r"^\s*(?:from [\w.]+ )?import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)
DOTTED = re.compile(r"`(marl_ray(?:\.\w+)+)(?:[:(][^`]*)?`")
TICKED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\([^`]*\))?`")
"""A name in back ticks, which may be dotted, or a call of it."""
ATTRIBUTE = re.compile(r"`([A-Z][a-z]\w*)\.([a-z_]\w*)(?:\([^`]*\))?`")
"""An attribute of a class in back ticks, or a call of it."""
IN_FILE = re.compile(r"`(\w+)`\s+(?:in|of)\s+`([\w./-]*\w\.py)`")
"""A name in back ticks, and the file that has it."""
CHAIN = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
TEXT = re.compile(r'(?P<line>^ *)?(?P<string>"""[\s\S]*?""")|(?:^ *|  )# .*', re.MULTILINE)
"""A string of several lines, which is a docstring if nothing is before it in its line, or a comment."""
FROM = re.compile(r"^\s*(?:import|from) (?!marl_ray|benchmarks)(\w+)", re.MULTILINE)
FILES = (".py", ".pyi", ".toml", ".yaml")
SETTINGS = ("*.toml", "jobs/**/*.yaml", "serve/**/*.yaml", "cluster/**/*.yaml", "helm/**/*.yaml", "src/**/*.toml")
NO_NAMES = {
    *("team.POLICY.hyper.NAME", "hyper.NAME", "package.module.NAME", "AGENT.action", "AGENT.log_prob"),
    *("TIMESTAMP.BODY", "marl_ray.KINDs", "checkpoint_ITERATION_ATTEMPT"),  # these and those above: places to fill in
    "checkpoint_backup",  # an example of a folder
    "c_j",  # a symbol of a formula
    "bytes_to_unicode",  # of GPT-2's tokenizer
    "create_id_based_action",  # of WebArena
    "enable_adapters",  # of peft
    "mbpp_deserialize_inputs",  # of EvalPlus
    "word_tokenize",  # of NLTK
    "Tuner.restore",  # of Ray Tune
    "pandas.DataFrame",  # of pandas, which is not needed
}
NO_MODULES = {"marl_ray.access", "marl_ray.KINDs"}
"""A logger, and what stands for the groups of entry points."""
DEFINED = r"\b(?:def|class|import) {0}\b|^\s*{0}\s*[:=,]|\"{0}\""
"""A module has a name as a function, a class or a variable of its own, or imported, at once or at its first use."""
WORD = re.compile(r"\w+")
SECTION = re.compile(r"^### (.+)$", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]+)")
ALONE = re.compile(r"`(--[a-z][a-z-]+)(?:[ =][^`]*)?`")
OF_OTHERS = {"--build-arg", "--no-verify", "--num-cpus", "--store"}
"""Options of docker, of git, of ray and of a benchmark's script that pages name alone."""
CALL = re.compile(r"\bmarl-ray ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)*)(.*)")


@cache
def sources() -> dict[Path, str]:
    """File of the repository's own Python -> its text."""
    return {path: path.read_text() for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}


def texts() -> Iterator[tuple[Path, str]]:
    yield from sources().items()
    yield from ((page, page.read_text()) for page in PAGES)


def files_written_on(page: Path) -> set[str]:
    """Return the names of the files that a reader of a page writes, also on the pages before it.

    They are the names of blocks, and what `marl-ray new` prints.
    """
    shown = [block for step in [*pages_before(page), page] for block in blocks(step)]
    return {
        name for block in shown for name in [block.name, *re.findall(r"^wrote (.+)", block.text, re.MULTILINE)] if name
    }


def test_files_that_pages_and_docstrings_name_exist():
    there = {f"/{path.relative_to(ROOT)}" for path in sources()}
    missing, count = [], 0
    for path, text in texts():
        made = files_written_on(path) if path.suffix == ".md" else set()
        for name in FILE.findall(ELSEWHERE.sub("", text)):
            count += 1
            if not any(other.endswith(f"/{name}") for other in there) and name not in made:
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert count > 150
    assert missing == []


def errors() -> set[str]:
    """All names of exceptions: Python's and the repository's own."""
    known = {
        name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
    }
    classes = [(name, bases) for text in sources().values() for name, bases in CLASS.findall(text)]
    before = 0
    while len(known) > before:
        before = len(known)
        known |= {name for name, bases in classes if known.intersection(WORD.findall(bases))}
    return known


def test_errors_that_docstrings_name_exist():
    known = errors()
    missing, count = [], 0
    for path, text in sources().items():
        imported = {name for several, line in IMPORTED.findall(text) for name in WORD.findall(several or line)}
        for names in RAISES.findall(text):
            for name in WORD.findall(names):
                if CAMEL.fullmatch(name):
                    count += 1
                    if name not in known and name not in imported:
                        missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert count > 300
    assert missing == []


def has(dotted: str) -> bool:
    """Return True if a dotted name is a module, or if its module has the other names."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        base = ROOT / "src" / Path(*parts[:length])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.exists():
                return all(
                    re.search(DEFINED.format(re.escape(name)), sources()[file], re.MULTILINE) for name in parts[length:]
                )
    return False


def test_modules_that_pages_and_docstrings_name_exist():
    others = NO_MODULES | {point.group for point in POINTS.values()}
    named = {(path, name) for path, text in texts() for name in DOTTED.findall(text) if name not in others}
    assert len(named) > 50
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in sorted(named) if not has(name)] == []


def test_names_that_pages_and_docstrings_place_in_a_file_are_defined_there():
    places = {(path, *place) for path, text in texts() for place in IN_FILE.findall(text)}
    wrong = [
        f"{path.relative_to(ROOT)}: {name} in {file}"
        for path, name, file in sorted(places)
        if not any(
            re.search(DEFINED.format(name), text, re.MULTILINE)
            for other, text in sources().items()
            if f"/{other.relative_to(ROOT)}".endswith(f"/{file}")
        )
    ]
    assert len(places) >= 5
    assert wrong == []


class Names(NamedTuple):
    """The names in the code of the package and of its benchmarks."""

    words: set[str]
    """All names, also those of files and of keys in settings."""
    pairs: set[tuple[str, str]]
    """(name, attribute) that stand so in the code."""
    holders: dict[str, set[str]]
    """Module, package or class -> the names in its file."""
    others: set[str]
    """Modules of other packages that are imported."""
    prose: dict[Path, str]
    """File -> its docstrings and comments."""


def split(text: str) -> tuple[str, str]:
    """Return the code of a file, and its docstrings and comments."""
    prose: list[str] = []

    def taken(match: re.Match[str]) -> str:
        if match["string"] and match["line"] is None:  # a text that the code uses
            return match[0]
        prose.append(match[0])
        return ""

    return TEXT.sub(taken, text), "\n".join(prose)


@cache
def code_names() -> Names:
    names = Names(set(dir(builtins)), set(), defaultdict(set), set(), {})
    for path, text in sources().items():
        if path.is_relative_to(ROOT / "tests"):
            continue
        code, names.prose[path] = split(text)
        chains = [chain.split(".") for chain in set(CHAIN.findall(code))]
        file_words = {word for chain in chains for word in chain}
        *folders, stem = path.relative_to(ROOT).with_suffix("").parts
        names.words.update(file_words, folders, [stem])
        names.pairs.update(pair for chain in chains for pair in pairwise(chain))
        for holder in (folders[-1] if stem == "__init__" else stem, *(name for name, _ in CLASS.findall(code))):
            names.holders[holder] |= file_words
        names.others.update(FROM.findall(code))
    for pattern in SETTINGS:
        names.words.update(word for path in ROOT.glob(pattern) for word in WORD.findall(path.read_text()))
    return names


def is_named(dotted: str) -> bool:
    """Return True if the code has a name, and each part of a dotted one where the part before it is."""
    names, parts = code_names(), dotted.split(".")
    if len(parts) > 1 and (parts[0] in names.others or hasattr(getattr(builtins, parts[0], None), parts[1])):
        return True
    return names.words.issuperset(parts) and all(
        (first, second) in names.pairs or second in names.holders.get(first, ()) for first, second in pairwise(parts)
    )


def test_names_in_docstrings_and_comments_are_in_the_code():
    named = {
        (path, name)
        for path, text in code_names().prose.items()
        for name in TICKED.findall(text)
        if ("_" in name or "." in name) and not name.endswith(FILES)
    }
    missing = {(path, name) for path, name in named if not is_named(name)}
    assert len(named) > 700
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in sorted(missing) if name not in NO_NAMES] == []
    assert {name for _, name in missing} >= NO_NAMES  # a name that is there needs no line


@cache
def attributes() -> dict[str, set[str]]:
    """Class of the package -> its attributes, those of its base classes too."""
    own_names: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for path, text in sources().items():
        for node in ast.walk(ast.parse(text)) if path.is_relative_to(ROOT / "src") else ():
            if isinstance(node, ast.ClassDef):
                bases[node.name] |= {base.id for base in node.bases if isinstance(base, ast.Name)}
                own_names[node.name] |= {
                    part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
                }
                own_names[node.name] |= {
                    part.id if isinstance(part, ast.Name) else part.attr
                    for part in ast.walk(node)
                    if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store)
                }

    def inherited(name: str) -> set[str]:
        return own_names[name].union(*(inherited(base) for base in bases[name] if base in own_names))

    return {name: inherited(name) for name in [*own_names]}


def test_attributes_that_pages_and_docstrings_name_are_those_of_their_class():
    named = {(path, *names) for path, text in texts() for names in ATTRIBUTE.findall(text) if names[0] in attributes()}
    wrong = {(path, f"{owner}.{name}") for path, owner, name in named if name not in attributes()[owner]}
    assert len(named) > 50
    # RLlib has an Algorithm too.
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in sorted(wrong)] == [
        "benchmarks/README.md: Algorithm.train"
    ]


@cache
def commands() -> dict[str, set[str]]:
    """Command -> its options, from the page that the commands themselves write."""
    page = (ROOT / "docs/command_line.md").read_text()
    _, *parts = SECTION.split(page)
    return {name: {*OPTION.findall(text), "--help"} for name, text in zip(parts[::2], parts[1::2], strict=True)}


def calls(page: Path) -> Iterator[str]:
    """The calls of the program that a page shows, each in one line without its comment."""
    text = page.read_text()
    shown = [block.text.replace("\\\n", " ") for block in blocks(page) if block.language == "bash"]
    shown += re.findall(r"`(marl-ray [^`]*)`", text.replace("\n", " "))
    for line in "\n".join(shown).splitlines():
        yield line.partition("  #")[0]


def wrong_in(call: str) -> Iterator[str]:
    """Yield what a call of the program names and the program does not have."""
    for words, rest in CALL.findall(call):
        several = words.split()
        names = [" ".join(several[:length]) for length in range(len(several), 0, -1)]
        name = next((name for name in names if name in commands()), None)
        is_group = any(other.startswith(f"{words} ") for other in commands())
        if name is None and not (is_group and not rest.strip()):
            yield call
        elif name is not None:
            yield from (f"{name} {option}" for option in OPTION.findall(rest) if option not in commands()[name])


def test_commands_and_options_that_pages_show_exist():
    shown = [(page, call) for page in PAGES for call in calls(page)]
    assert sum("marl-ray" in call for _, call in shown) > 200
    assert [f"{page.relative_to(ROOT)}: {wrong}" for page, call in shown for wrong in wrong_in(call)] == []
    known = set().union(*commands().values(), OF_OTHERS)
    alone = {(page, option) for page in PAGES for option in ALONE.findall(page.read_text())}
    assert [f"{page.relative_to(ROOT)}: {option}" for page, option in sorted(alone) if option not in known] == []


def test_what_is_not_there_is_found():
    assert list(wrong_in("marl-ray trian x.yaml")) == ["marl-ray trian x.yaml"]
    assert list(wrong_in("marl-ray submit train x.yaml --cluster c.yaml")) == ["submit train --cluster"]
    assert list(wrong_in("marl-ray runs")) == list(wrong_in("marl-ray runs ls --json")) == []
    assert has("marl_ray.api.client.Client") and not has("marl_ray.api.client.Customer") and not has("marl_ray.no")
    assert {"ValueError", "MarlRayError", "FieldError"} <= errors() and "Client" not in errors()
    assert is_named("Client.act") and is_named("train.total_steps") and is_named("torch.func.functional_call")
    assert not is_named("Client.dance") and not is_named("send_no_weights") and not is_named("experiments.log_evidence")


def test_programs_that_pages_show_call_what_the_api_has():
    objects = {"client": marl_ray.Client, "team": LoadedTeam, "run": marl_ray.TrainedRun, "marl_ray": marl_ray}
    programs = [block.text for page in PAGES for block in blocks(page) if "import marl_ray\n" in block.text]
    api_calls = {call for program in programs for call in re.findall(r"\b(client|team|run|marl_ray)\.(\w+)\(", program)}
    assert {("client", "act"), ("team", "act"), ("run", "load"), ("marl_ray", "evaluate")} <= api_calls
    assert [f"{name}.{called}" for name, called in sorted(api_calls) if not hasattr(objects[name], called)] == []
