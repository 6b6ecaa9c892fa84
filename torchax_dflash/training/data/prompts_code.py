# SPDX-License-Identifier: Apache-2.0
"""Programming prompts: real functions, synthetic ones, and tasks in words."""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from torchax_dflash.training.data.phrases import CODE_QUESTION, PHRASES

_PHRASES = PHRASES["code"]
_MAX_CHARACTERS = 800  # of a function's signature and docstring

_FILTERS: dict[str, Callable[[int], bool]] = {
    "even": lambda x: x % 2 == 0,
    "odd": lambda x: x % 2 == 1,
    "positive": lambda x: x > 0,
    "negative": lambda x: x < 0,
    "nonzero": lambda x: x != 0,
    "two-digit": lambda x: 10 <= abs(x) < 100,
    "one-digit": lambda x: abs(x) < 10,
    "divisible by three": lambda x: x % 3 == 0,
    "greater than ten": lambda x: x > 10,
}
_FOLDS: dict[str, tuple[str, str, Callable[[list[int]], object]]] = {
    "sum": ("sum_of", "int", sum),
    "count": ("count", "int", len),
    "largest": ("largest", "Optional[int]", lambda xs: max(xs, default=None)),
    "smallest": ("smallest", "Optional[int]", lambda xs: min(xs, default=None)),
    "squares": ("squares_of", "List[int]", lambda xs: [x * x for x in xs]),
    "doubles": ("double", "List[int]", lambda xs: [2 * x for x in xs]),
    "sorted list": ("sort", "List[int]", sorted),
    "reversed list": ("reverse", "List[int]", lambda xs: xs[::-1]),
    "distinct values": ("distinct", "List[int]", lambda xs: sorted(set(xs))),
    "last": ("last", "Optional[int]", lambda xs: xs[-1] if xs else None),
    "first": ("first", "Optional[int]", lambda xs: xs[0] if xs else None),
}


def prompts(seed: int) -> Iterator[str]:
    """Endless: five real functions, two synthetic ones, one task in words."""
    rng = random.Random(f"code {seed}")
    real = _real_functions(rng)
    while True:
        for _ in range(5):
            yield next(real, None) or _synthetic(rng)
        yield _synthetic(rng)
        yield _synthetic(rng)
        yield rng.choice(_PHRASES["task_forms"]).format(rng.choice(_PHRASES["tasks"]))


def _real_functions(rng: random.Random) -> Iterator[str]:
    """Documented functions of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    files: list[Path] = []
    for root in (Path(paths["stdlib"]), Path(paths["purelib"])):
        for file in sorted(root.rglob("*.py")):
            if "test" not in str(file.relative_to(root)).lower():
                files.append(file)
    files = list(dict.fromkeys(files))
    rng.shuffle(files)
    for file in files:
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(file.read_text())
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        found = [_as_problem(f) for f in ast.walk(tree) if _is_documented(f)]
        found = [text for text in found if text]
        # A few from each file, so that no package dominates.
        yield from rng.sample(found, min(4, len(found)))


def _is_documented(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.FunctionDef)
        and not node.decorator_list
        and not node.name.startswith("__")
        and len(ast.get_docstring(node) or "") > 40
    )


def _as_problem(function: ast.AST) -> str | None:
    assert isinstance(function, ast.FunctionDef)
    if function.args.args and function.args.args[0].arg in ("self", "cls"):
        del function.args.args[0]
    try:
        arguments = ast.unparse(function.args)
        returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    except (ValueError, IndexError):  # a default value of the removed argument
        return None
    doc = (ast.get_docstring(function) or "").replace("\n", "\n    ")
    text = f'def {function.name}({arguments}){returns}:\n    """ {doc}\n    """\n'
    return CODE_QUESTION.format(text) if len(text) <= _MAX_CHARACTERS else None


def _synthetic(rng: random.Random) -> str:
    kind, keep = rng.choice(list(_FILTERS.items()))
    fold, (prefix, returns, compute) = rng.choice(list(_FOLDS.items()))
    argument = rng.choice(("numbers", "nums", "lst", "values", "arr", "items", "xs"))
    name = f"{prefix}_{kind}".replace(" ", "_").replace("-", "_")
    name += rng.choice(("", "_numbers", "_elements", "_values"))
    doc = rng.choice(_PHRASES["sentences"]).format(
        fold=fold, filter=kind, name=argument
    )
    for _ in range(rng.randint(0, 3)):
        xs = [rng.randint(-20, 40) for _ in range(rng.randint(3, 8))]
        value = compute([x for x in xs if keep(x)])
        doc += f"\n    >>> {name}({xs})\n    {value}"
    head = "from typing import List, Optional\n\n\n" if rng.random() < 0.7 else ""
    signature = f"def {name}({argument}: List[int]) -> {returns}:"
    return CODE_QUESTION.format(f'{head}{signature}\n    """ {doc}\n    """\n')
