"""No file of the gateway imports another one that comes back to it, not even for a type."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import marl_ray

SOURCES = Path(marl_ray.__file__).parent.parent


def imports(package: str) -> dict[str, set[str]]:
    """Module -> the modules below `package` that it imports, wherever the import stands."""
    files = {path: list(path.relative_to(SOURCES).with_suffix("").parts) for path in SOURCES.rglob("*.py")}
    modules = {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in files.items()}
    found = {}
    for module, path in modules.items():
        if not module.startswith(package):
            continue
        named = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= (whole & modules.keys()) or {node.module}
        found[module] = {name for name in named if name.startswith(package) and name in modules} - {module}
    return found


def test_the_gateway_has_no_import_circle():
    graph = imports("marl_ray.serving")
    assert len(graph) > 40
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"these import each other: {' -> '.join(error.args[1])}") from None
