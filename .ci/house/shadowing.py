"""Check of local variables: a reader of `run` in a function must not have to ask whether it is that of the module."""

import symtable
from collections.abc import Iterator

from sources import Finding, SourceFile


def shadowing(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the local variables that have the name of something that their module imports or defines.

    A parameter may, because the signature shows it, and so may an import: it is of the same thing, which the module
    imports for types alone.
    """
    for file in files:
        if not (file.module or file.name.startswith("benchmarks/")):
            continue
        module = symtable.symtable(file.text, file.name, "exec")
        names = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
        for table in scopes(module):
            for symbol in table.get_symbols():
                is_variable = symbol.is_local() and not symbol.is_parameter() and not symbol.is_imported()
                if is_variable and symbol.get_name() in names:
                    message = f"the local {symbol.get_name()} has the name of something in its module"
                    yield Finding(file.name, table.get_lineno(), message)


def scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """Yield the symbol tables of all functions and comprehensions in a scope.

    Those of classes are left out, because their names are attributes.
    """
    for child in table.get_children():
        if child.get_type() != "class":
            yield child
        yield from scopes(child)
