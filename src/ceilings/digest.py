"""Fingerprint of the code that a record rests on.

The digest covers an experiment module and every module of this package that it imports, directly or not, as
syntax trees: comments, docstrings and formatting do not count, any other change does. It is read from the source,
so that nothing has to be imported to see whether a record is stale.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["code_digest", "code_modules"]

_PACKAGE: Final = "ceilings"
_SOURCE: Final = Path(__file__).resolve().parent

# NOTE these store, name and announce a result and compute none of it. With them in the digest, a better error
# message would make every record of the book stale; what they do to a stored number is part of FORMAT_VERSION.
_NOT_MEASURING: Final = {f"{_PACKAGE}.results", f"{_PACKAGE}.digest", f"{_PACKAGE}.experiments._command"}


def code_digest(module: str, config: Mapping[str, Any], source: Path | None = None) -> str:
    """SHA-256 of an experiment's code and configuration.

    Parameters
    ----------
    module
        Full name, such as ``ceilings.experiments.forced``.
    config
        The configuration, as plain JSON values.
    source
        Folder of the package's source; None for the one that is installed.

    Returns
    -------
    str
        Hexadecimal digest.

    Notes
    -----
    Imports inside functions count. A module that is imported by a name computed at run time is not seen.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, allow_nan=False).encode())
    for name, tree in sorted(code_modules(module, source).items()):
        digest.update(f"\n{name}\n{_canonical(tree)}".encode())
    return digest.hexdigest()


def code_modules(module: str, source: Path | None = None) -> dict[str, ast.Module]:
    """Modules of the package that a module rests on, itself included.

    Parameters
    ----------
    module
        Full name of a module of the package.
    source
        Folder of the package's source; None for the one that is installed.

    Returns
    -------
    dict
        Syntax trees by full name.

    Raises
    ------
    ValueError
        If there is no such module.
    """
    root = _SOURCE if source is None else source
    if _file(module, root) is None:
        raise ValueError(f"there is no module {module}: a record is named after its experiment")
    trees: dict[str, ast.Module] = {}
    waiting = _with_parents(module)
    while waiting:
        name = waiting.pop()
        path = _file(name, root)
        if name in trees or name in _NOT_MEASURING or path is None:
            continue
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
        waiting += _imports(trees[name], name if path.name == "__init__.py" else name.rpartition(".")[0])
    return trees


def _file(module: str, root: Path) -> Path | None:
    """Source file of a module of the package; None for anything else."""
    head, *parts = module.split(".")
    base = root.joinpath(*parts)
    candidates = [base / "__init__.py"] + ([base.with_suffix(".py")] if parts else [])
    return next((c for c in candidates if c.is_file()), None) if head == _PACKAGE else None


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Names that may be modules of the package: what is imported, and what is imported from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in found:
            yield from _with_parents(name)


def _with_parents(module: str) -> list[str]:
    """A module and the packages that hold it: importing a.b.c runs a and a.b first."""
    parts = module.split(".")
    return [".".join(parts[: k + 1]) for k in range(len(parts))]


def _canonical(node: Any) -> str:
    """Write a syntax tree as text; unlike `ast.dump`, alike in versions of Python that add empty fields."""
    if isinstance(node, ast.AST):
        fields = [
            f"{name}={_canonical(value)}"
            for name, value in ast.iter_fields(node)
            if value is not None and value != [] and name not in ("kind", "type_comment")
        ]
        return f"{type(node).__name__}({','.join(sorted(fields))})"
    if isinstance(node, list):
        return f"[{','.join(_canonical(child) for child in node if not _is_silent(child))}]"
    return repr(node)


def _is_silent(node: Any) -> bool:
    """Whether a statement computes nothing: a docstring, or the version of the package."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.Assign) and [getattr(t, "id", None) for t in node.targets] == ["__version__"]
