"""The layout and the words: imports, folders, names of types, the first words of docstrings, the names of variables."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from vague_names import name_of, nodes, vague_alone, vague_names

import marl_ray

SOURCES = Path(marl_ray.__file__).parent.parent
ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FOLDERS = sorted({path.parent for path in SOURCES.glob("marl_ray/**/*.py")})
FILES = 9
"""Most files of a folder besides its `__init__.py`."""
LINES = 400
"""Most lines of a file."""
FRAGMENT = re.compile(r"(What|Of|How|Whether|If|Where|When|Which|Who|Whose|Why|As|And|But|\.\.\.)\b")
"""First words of a docstring that is a fragment and no sentence, or that hides its subject."""
NO_VERB = re.compile(
    r"[^A-Z]|(The|An?|All|Any|Both|Each|Every|Number|One|This|True|False|None|In|At|Within|For|From|With|Without)\b|"
    r"[A-Z][\w-]*('s|[^\Ws]s|Error)\b"
)
"""First words of a function's docstring that are no verb in the imperative: also plurals, and verbs in the third person."""
FOREIGN = {
    ("tests/integration/training/tracking/test_deliveries.py", "_client"),  # MLflow's
    ("tests/unit/policies/prompting/test_prompts.py", "_tokenizer"),  # of transformers
    ("tests/unit/envs/test_envs.py", "_RandomMixin__np_random"),  # of multigrid
}
"""Private names of other libraries that the product has too, and the tests that use them."""


@cache
def trees() -> dict[str, ast.Module]:
    """Module -> its syntax tree."""
    parsed = {}
    for path in SOURCES.glob("marl_ray/**/*.py"):
        parts = list(path.relative_to(SOURCES).with_suffix("").parts)
        parsed[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return parsed


@cache
def trees_beside_the_sources() -> dict[str, ast.Module]:
    """File of tests, benchmarks and what else is not the product itself -> its syntax tree."""
    files = [
        path
        for folder in ("tests", "benchmarks", "cluster", "jobs", "serve", "docs", ".ci")
        for path in (ROOT / folder).rglob("*.py")
    ]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """A million nodes are no burden for the tests of other files."""
    yield
    for cached in (trees, trees_beside_the_sources, nodes):
        cached.cache_clear()


def imports() -> dict[str, set[str]]:
    """Module -> the modules of the product that it imports, wherever the import stands, also for types alone."""
    modules, graph = trees(), {}
    for module, tree in modules.items():
        named: set[str] = set()
        for node in nodes(tree):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= (members & modules.keys()) or {node.module}
        graph[module] = (named & modules.keys()) - {module}
    return graph


def test_no_file_imports_one_that_comes_back_to_it():
    graph = imports()
    assert len(graph) > 300
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"these import each other: {' -> '.join(error.args[1])}") from None


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(SOURCES)))
def test_a_folder_is_small_and_says_its_purpose(folder):
    files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    if folder.name != "versions":  # migrations of the database only ever become more
        assert len(files) <= FILES
    purpose = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert purpose and purpose.split("\n")[0].endswith(".")


def test_a_folder_of_benchmarks_is_small_and_its_files_do_not_repeat_its_name():
    """One of environments holds no `own_environment.py`; each says its purpose in one sentence."""
    for folder in {path.parent for path in (ROOT / "benchmarks").glob("*/*.py")}:
        stems = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        assert len(stems) <= FILES, folder
        words = {word.removesuffix("s") for stem in stems for word in stem.split("_")}
        assert folder.name.removesuffix("s") not in words, folder
        purpose = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert purpose and purpose.endswith(".") and "\n" not in purpose


def test_a_folder_of_tests_is_small():
    """Without `conftest.py`."""
    counts = Counter(path.parent for path in TESTS.rglob("*.py") if path.name not in ("__init__.py", "conftest.py"))
    assert [str(folder.relative_to(ROOT)) for folder, count in counts.items() if count > FILES] == []


def test_a_file_is_short():
    """Also of tests and of what else is not the product itself."""
    files = [*SOURCES.glob("marl_ray/**/*.py"), *(ROOT / file for file in trees_beside_the_sources())]
    assert len(files) > 700
    assert [str(path) for path in files if path.read_text().count("\n") > LINES] == []


def type_names(tree: ast.Module) -> list[str]:
    """Public names of a module's classes and type aliases; a type variable of one letter is no name."""
    names = []
    for node in (part for top in tree.body for part in (top.body if isinstance(top, ast.If) else [top])):
        match node:
            case ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if (
                not name.isupper()
            ):
                names.append(name)
            case _ if type(node).__name__ == "TypeAlias":  # a `type` statement, which Python 3.11 does not parse
                names.append(node.name.id)
    return [name for name in names if name[0].isupper()]


def test_a_public_type_name_means_one_thing():
    names = Counter(name for tree in trees().values() for name in type_names(tree))
    assert [name for name, count in names.items() if count > 1] == []


def fragments(trees_by_name: Mapping[str, ast.Module]) -> list[str]:
    """The docstrings that begin like a fragment, each with its file and line."""
    return [
        f"{name}:{node.lineno}: {node.value.value.strip()[:60]}"
        for name, tree in trees_by_name.items()
        for node in nodes(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if FRAGMENT.match(node.value.value.strip())
    ]


def test_a_docstring_begins_like_a_sentence():
    assert fragments(trees()) == []


def test_a_docstring_of_tests_and_benchmarks_begins_like_a_sentence():
    assert len(trees_beside_the_sources()) > 300
    assert fragments(trees_beside_the_sources()) == []


def without_verb(tree: ast.Module) -> list[str]:
    """The docstrings of functions that begin with no verb, each with its line.

    A property's docstring says what it is, as an attribute's does; that of an `__init__` may list its arguments.
    """
    docstrings = [
        (node.lineno, " ".join(text.split())[:60])
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        if (text := ast.get_docstring(node)) and not (node.name == "__init__" and re.match("[`a-z]", text))
    ]
    return [f"{line}: {text}" for line, text in docstrings if NO_VERB.match(text)]


def test_the_docstring_of_a_function_begins_with_a_verb():
    """In the imperative, as in PEP 257: `Return the rows of a file`, `Raise ValueError if ...`."""
    assert {name: texts for name, tree in trees().items() if (texts := without_verb(tree))} == {}
    assert without_verb(ast.parse('def f():\n    """True if it is."""')) == ["1: True if it is."]
    assert without_verb(ast.parse('def f():\n    """Returns a row."""')) == ["1: Returns a row."]
    assert without_verb(ast.parse('def f():\n    """Pass a row."""')) == []


def test_unit_tests_have_the_folders_of_the_sources():
    """So the tests of a file are where the file is; `docs` has those of the documentation."""
    folders = {path.parent.relative_to(TESTS / "unit") for path in (TESTS / "unit").rglob("test_*.py")} - {Path("docs")}
    assert folders <= {path.relative_to(SOURCES / "marl_ray") for path in FOLDERS}


def test_no_test_imports_a_private_name():
    """A test that did would hold back every change of what nobody else may use."""
    private = [
        f"{file}:{node.lineno}: {node.module} {alias.name}"
        for file, tree in trees_beside_the_sources().items()
        if file.startswith("tests/")
        for node in nodes(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "marl_ray"
        for alias in node.names
        if any(part.startswith("_") for part in [*(node.module or "").split("."), alias.name])
        if alias.name != "__version__"
    ]
    assert private == []


def is_private(name: str) -> bool:
    """True for private names, but for the methods of named tuples."""
    return name.startswith("_") and not name.endswith("_") and name not in ("_replace", "_asdict", "_fields")


def private_names(tree: ast.Module) -> set[str]:
    """The private names that a module gives: of functions, methods and attributes."""
    names = {name_of(node) for node in nodes(tree)} | set(top_names(tree))
    return {name for name in names if is_private(name)}


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Private names that a test reads of anything but itself, or replaces by `setattr`, each with its line."""
    for node in nodes(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(attr=name) if is_private(name):
                yield node.lineno, name
            case ast.Call(func=ast.Attribute(attr="setattr"), args=arguments):
                texts = [part.value for part in arguments if isinstance(part, ast.Constant)]
                yield from ((node.lineno, name) for text in texts if is_private(name := str(text).split(".")[-1]))


def test_no_test_reads_a_private_name_of_the_product():
    """Whoever changes a private name then reads no test; a test that has to see a part makes it public."""
    private = set().union(*map(private_names, trees().values()))
    read = [
        f"{file}:{line}: {name}"
        for file, tree in trees_beside_the_sources().items()
        if file.startswith("tests/")
        for line, name in private_uses(tree)
        if name in private and (file, name) not in FOREIGN
    ]
    assert read == []
    assert [name for _, name in private_uses(ast.parse("a._b = self._c\npatch.setattr('m._d', 1)"))] == ["_b", "_d"]


def test_tests_have_no_annotation_of_what_they_return():
    annotated = [
        f"{file}: {node.name}"
        for file, tree in trees_beside_the_sources().items()
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_") and node.returns
    ]
    assert annotated == []


def test_a_name_says_what_a_variable_holds_or_a_function_does():
    assert vague_names(trees()) == []
    assert vague_names(trees_beside_the_sources()) == []


def test_a_word_that_says_nothing_alone_is_no_name():
    """That holds in benchmarks and tests too, but for hypothesis's `given`."""
    assert vague_alone(trees()) == []
    assert vague_alone(trees_beside_the_sources()) == []
    seen = "left, right = 1, 2\ndef _left(given): self.kept = here\ndef ends(): left, right = 1, 2"
    names = [name for _, name in (line.split(": ") for line in vague_alone({"a": ast.parse(seen)}))]
    assert sorted(names) == ["_left", "given", "here", "kept", "left"]


def test_one_file_imports_the_private_parts_of_ray():
    private = {
        module
        for module, tree in trees().items()
        for node in nodes(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray"
        for name in [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        if name.startswith("_")
    }
    assert private == {"marl_ray.ray_seams"}


def test_the_product_imports_no_library_of_tests():
    """Only a driver in the sandbox does, which runs the unit tests of a benchmark."""
    driver = "marl_ray.evaluation.benchmarks.sandboxed.unittest_driver"
    libraries = {"hypothesis", "pytest", "unittest"}
    users = [
        name
        for name, tree in trees().items()
        for node in nodes(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        )
        if module.partition(".")[0] in libraries
    ]
    assert set(users) == {driver}


def overridden_privates(tree: ast.Module) -> list[str]:
    """Methods named `_x` of classes whose base the module imports from Ray: they replace or use a private part of Ray."""
    imported = {
        alias.asname or alias.name
        for node in nodes(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray"
        for alias in node.names
    }
    return [
        f"{node.name}.{method.name}"
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
        if any(getattr(part, "id", "") in imported for base in node.bases for part in ast.walk(base))
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        if method.name.startswith("_") and not method.name.startswith("__")
    ]


def test_no_other_file_overrides_a_private_method_of_ray():
    overriding = {name: methods for name, tree in trees().items() if (methods := overridden_privates(tree))}
    assert set(overriding) <= {"marl_ray.ray_seams"}
    seen = "from ray.x import Client\ndef connect():\n    class Slow(Client):\n        def _send(self): ...\n"
    assert overridden_privates(ast.parse(seen)) == ["Slow._send"]


def test_a_public_function_or_class_has_a_docstring():
    """Every one at the top of a module, but overloads, migrations and programs that are sent into the sandbox."""
    without = [
        f"{module}:{node.lineno}: {node.name}"
        for module, tree in trees().items()
        if not {"versions", "sandboxed"} & set(module.split("."))
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not node.name.startswith("_") and not ast.get_docstring(node)
        if all(getattr(decorator, "id", "") != "overload" for decorator in node.decorator_list)
    ]
    assert without == []


def top_names(tree: ast.Module) -> dict[str, int]:
    """Names that a module gives at its top, without decorated functions and classes, each with its line."""
    names = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if not node.decorator_list:
                names[node.name] = node.lineno
            case ast.ClassDef(decorator_list=[*_]):  # what is made of a class does not register it
                names[node.name] = node.lineno
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names[name] = node.lineno
    return names


def words_read(tree: ast.Module) -> set[str]:
    """Names that a tree reads, imports, or has in a text; in whatever module."""
    words: set[str] = set()
    for node in nodes(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
                words.add(name)
            case ast.Constant(value=str() as text) if len(text) < 200:  # names by which a part is found, and types
                words |= set(re.findall(r"\w+", text))
    return words


def test_what_a_module_defines_is_read_in_the_product():
    """Also in what the documentation tells users to import; tests alone do not count."""
    others = [path for folder in ("benchmarks", "jobs", "serve") for path in (ROOT / folder).rglob("*.py")]
    read = set().union(*(words_read(tree) for tree in [*trees().values(), *(ast.parse(p.read_text()) for p in others)]))
    read |= {word for page in (ROOT / "docs").rglob("*.md") for word in re.findall(r"import (\w+)", page.read_text())}
    unread = [
        f"{module}:{line}: {name}"
        for module, tree in trees().items()
        if not {"versions", "sandboxed"} & set(module.split("."))
        for name, line in top_names(tree).items()
        if name not in read and not (name.startswith("__") and name.endswith("__"))
    ]
    assert unread == []
