"""The page of the library: one section a module, in the order in which data flows.

    python tools/api.py build    write book/api.md
    python tools/api.py check    is it what the modules say?

The page holds only the directives; what they show comes from the docstrings when the book is built.
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

__all__ = ["modules", "page"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "ceilings"
TARGET = ROOT / "book" / "api.md"

# The flow of data (a module imports from none further down), then what serves the chapters and tests.
FLOW = """
policies samplers transformer prefix_tree pretrained jsonl tasks rollouts sampling puzzles
moments moments_file scores score_rules score_capture fisher ceiling looseness pullback next_token
off_policy advantages losses batches sources methods training
updates adapters checkpoints patch digest results experiments
measurement summary report report_page charts readable expected_cost run_folder measure_command cli
symbolic reference testing notebook figures
"""
ORDER = FLOW.split()

HEAD = """# The library, module by module

The book is one user of the library `ceilings`; you can be another. `import ceilings` loads almost nothing,
so import from the modules: `from ceilings.ceiling import tightness`. Bad input raises a `ValueError` that says
what is wrong and where. Shapes and units stand in each entry, with the letters of [the notation](notation.md).
"""

SECTION = """
## {title}

```{{eval-rst}}
.. automodule:: {module}
   :members:
{options}```
"""


def modules() -> list[str]:
    """The public modules, in reading order: those that say by ``__all__`` what they offer."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if any(part.startswith("_") for part in parts):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(assigns(node, "__all__") for node in tree.body):
            found.append(".".join(parts))
    return sorted(found, key=rank)


def assigns(node: ast.stmt, name: str) -> bool:
    """Is this statement ``name = …``?"""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def aliases(module: str) -> list[str]:
    """Names that a module offers for a built-in type such as ``dict[str, float]``: they have no source to show."""
    text = PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    body = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    offered = next(ast.literal_eval(node.value) for node in body if assigns(node, "__all__"))
    return [
        name
        for name in offered
        for node in body
        if assigns(node, name) and re.match(r"(dict|list|tuple|set|frozenset)\[", ast.unparse(node.value))
    ]


def section(name: str) -> str:
    """The section of a module."""
    left_out = aliases(name)
    options = f"   :exclude-members: {', '.join(left_out)}\n" if left_out else ""
    return SECTION.format(title=name, module=f"ceilings.{name}", options=options)


def rank(module: str) -> tuple[int, str]:
    """Where a module stands on the page; one that the order does not know comes last."""
    top = module.split(".")[0]
    return (ORDER.index(top) if top in ORDER else len(ORDER), module)


def page() -> str:
    """The text of the page."""
    return HEAD + "".join(section(name) for name in modules())


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the page of the library.")
    parser.add_argument("command", choices=["build", "check"])
    if parser.parse_args().command == "build":
        TARGET.write_text(page(), encoding="utf-8")
        print(f"{TARGET.relative_to(ROOT)}: {len(modules())} modules")
        return 0
    if TARGET.read_text(encoding="utf-8") != page():
        print("book/api.md does not list the modules of src/ceilings; run: make api")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
