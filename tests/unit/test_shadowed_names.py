"""Local variables and the names of their modules: whoever reads `run` in a function must not have to ask which one it is."""

import symtable
from collections.abc import Iterator
from pathlib import Path

import marl_ray

SOURCES = Path(marl_ray.__file__).parent
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """Yield the symbol tables of all functions and comprehensions in a scope; the names of a class are attributes."""
    for child in table.get_children():
        if child.get_type() != "class":
            yield child
        yield from tables(child)


def shadowing(source: str, file: str) -> list[str]:
    """The local variables that have the name of something that their module imports or defines.

    A parameter may, because the signature shows it, and so may an import: it is of the same thing, which the module
    imports for types alone.
    """
    module = symtable.symtable(source, file, "exec")
    names = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    return [
        f"{file}:{table.get_lineno()}: {symbol.get_name()}"
        for table in tables(module)
        for symbol in table.get_symbols()
        if symbol.is_local() and not symbol.is_parameter() and not symbol.is_imported()
        if symbol.get_name() in names
    ]


def test_no_local_variable_has_the_name_of_something_in_its_module():
    files = [*SOURCES.rglob("*.py"), *BENCHMARKS.rglob("*.py")]
    assert len(files) > 700
    assert [line for path in files for line in shadowing(path.read_text(), str(path))] == []


def test_variables_loops_and_functions_in_functions_shadow():
    source = """
from a import b, c
def d(): ...
def by_name(b):
    c = [d for d in b]
    def by_name(): ...
    return c
class E:
    b = 1
    def c(self): ...
"""
    assert sorted(shadowing(source, "f")) == ["f:4: by_name", "f:4: c", "f:5: d"]
