"""Builds the prompts that the target answers: four kinds, three splits, seeded and without duplicates.

Training and validation prompts come from one set of templates, topics and source texts (the docstrings and
code of the Python standard library, licence texts); the held-out `test` split uses templates, topics and
source files that the other two never see. Nothing is read from the network.
"""

import ast
import pathlib
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sglang_spec_ext.models import prompt_templates as templates
from sglang_spec_ext.models import prompt_topics as topics

KINDS = ("chat", "code", "prose", "maths")
SPLITS = ("train", "validation", "test")
VALIDATION_SHARE = 0.03


def _modules(names: str) -> tuple[str, ...]:
    return tuple(names.split())


# Standard-library modules whose text feeds prompts; the two lists are disjoint.
TRAIN_MODULES = _modules("""
argparse ast base64 bisect calendar cmd codecs collections/__init__ configparser contextlib copy csv
datetime difflib enum fileinput fractions ftplib functools getopt gettext glob gzip heapq hmac html/parser
imaplib inspect ipaddress json/decoder json/encoder logging/__init__ lzma mailbox mimetypes netrc ntpath
numbers operator optparse os pdb pickle pickletools plistlib poplib posixpath pprint profile pstats queue
quopri random re/_parser reprlib sched secrets selectors shelve shlex shutil smtplib socket socketserver
sqlite3/dump ssl stat statistics string subprocess symtable tarfile telnetlib tempfile textwrap threading
timeit tokenize trace traceback types typing unittest/case unittest/mock urllib/parse urllib/request uuid
warnings wave weakref webbrowser zipfile zoneinfo/_zoneinfo
""")
HELD_OUT_MODULES = _modules("""
bdb binhex chunk cProfile dis doctest filecmp fnmatch graphlib http/client http/cookies keyword linecache
locale mailcap nntplib nturl2path pathlib pkgutil platform py_compile pydoc rlcompleter runpy sndhdr
sre_parse stringprep tabnanny turtle uu xdrlib zipapp compileall colorsys abc aifc asyncio/queues
asyncio/locks decimal _pydecimal concurrent/futures/thread email/message email/utils
""")


@dataclass(frozen=True)
class Prompt:
    """One user message, its kind (one of KINDS) and its split (one of SPLITS)."""

    text: str
    kind: str
    split: str


def stdlib_texts(modules: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return (docstrings, function sources) of standard-library modules, 120 to 700 characters each."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    docs, functions = [], []
    for module in modules:
        path = root / f"{module}.py"
        if not path.exists():  # modules come and go between Python versions
            continue
        source = path.read_text(encoding="utf-8", errors="ignore")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                paragraph = (ast.get_docstring(node) or "").strip()[:700].rsplit("\n\n", 1)[0]
                if 120 <= len(paragraph) <= 700:
                    docs.append(paragraph)
            if isinstance(node, ast.FunctionDef):
                body = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                if 120 <= len(body) <= 700:
                    functions.append(body)
    return docs, functions


def licence_texts() -> list[str]:
    """Return paragraphs of the licence texts that this Python and this system carry (may be few)."""
    folders = (pathlib.Path("/usr/share/common-licenses"), pathlib.Path(sysconfig.get_paths()["stdlib"]))
    files = [
        path
        for folder in folders
        if folder.is_dir()
        for path in sorted(folder.glob("[A-Z]*"))
        if path.is_file()
    ]
    paragraphs = [
        " ".join(paragraph.split())
        for path in files
        if path.suffix in {"", ".txt"}
        for paragraph in path.read_text(encoding="utf-8", errors="ignore").split("\n\n")
    ]
    return sorted({paragraph for paragraph in paragraphs if 150 <= len(paragraph) <= 700})


def build_prompts(seed: int, *, per_kind: int = 1600, test_per_kind: int = 60) -> list[Prompt]:
    """Return distinct prompts: `per_kind` for training and validation together, `test_per_kind` held out.

    The order mixes the kinds, so that any prefix of the list is balanced.
    """
    rng = np.random.default_rng(seed)
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for held_out, count in ((False, per_kind), (True, test_per_kind)):
        makers = _makers(rng, held_out=held_out)
        chosen = {kind: _distinct(makers[kind], count, rng=rng, seen=seen) for kind in KINDS}
        for rank in range(count):
            split = "test" if held_out else "validation" if rng.random() < VALIDATION_SHARE else "train"
            prompts.extend(
                Prompt(chosen[kind][rank], kind, split) for kind in KINDS if rank < len(chosen[kind])
            )
    return prompts


def _distinct(
    makers: list[Callable[[], str]], count: int, *, rng: np.random.Generator, seen: set[str]
) -> list[str]:
    """Draw until `count` texts outside `seen` are found; stop early when the templates are exhausted."""
    found: list[str] = []
    for _ in range(50 * count):
        if len(found) == count:
            break
        text = makers[int(rng.integers(len(makers)))]()
        if text not in seen:
            seen.add(text)
            found.append(text)
    return found


def _makers(rng: np.random.Generator, *, held_out: bool) -> dict[str, list[Callable[[], str]]]:
    """Return for each kind a list of functions, each drawing one prompt."""

    def pick(items: tuple[str, ...] | list[str]) -> str:
        return items[int(rng.integers(len(items)))]

    def listed(name: str) -> tuple[str, ...]:
        values: tuple[str, ...] = getattr(topics, f"{'HELD_OUT' if held_out else 'TRAIN'}_{name}")
        return values

    def fill(template: str) -> str:
        lists = {
            "s": "SUBJECTS",
            "t": "SUBJECTS",
            "k": "TASKS",
            "c": "CODE_THINGS",
            "h": "CHARACTERS",
            "g": "CHARACTERS",
            "p": "PLACES",
            "i": "ITEMS",
            "n": "NAMES",
            "m": "MATH_TOPICS",
        }
        numbers = {"a": (20, 200), "b": (10, 100), "d": (2, 13), "e": (2, 20)}
        fields = {field: pick(listed(name)) for field, name in lists.items()}
        fields |= {field: str(rng.integers(*bounds)) for field, bounds in numbers.items()}
        return template.format(**fields)

    docs, functions = stdlib_texts(HELD_OUT_MODULES if held_out else TRAIN_MODULES)
    texts = docs if held_out else docs + licence_texts()
    chat, code, prose, maths, about_text, about_code = (
        (
            templates.TEST_CHAT,
            templates.TEST_CODE,
            templates.TEST_PROSE,
            templates.TEST_MATHS,
            templates.TEST_ABOUT_TEXT,
            templates.TEST_ABOUT_CODE,
        )
        if held_out
        else (
            templates.TRAIN_CHAT,
            templates.TRAIN_CODE,
            templates.TRAIN_PROSE,
            templates.TRAIN_MATHS,
            templates.TRAIN_ABOUT_TEXT,
            templates.TRAIN_ABOUT_CODE,
        )
    )

    def templated(templates: tuple[str, ...]) -> Iterator[Callable[[], str]]:
        return ((lambda template=template: fill(template)) for template in templates)

    def quoting(templates: tuple[str, ...], sources: list[str]) -> Iterator[Callable[[], str]]:
        return ((lambda template=template: template.replace("{x}", pick(sources))) for template in templates)

    return {
        "chat": [*templated(chat), *quoting(about_text, texts)],
        "code": [*templated(code), *quoting(about_code, functions)],
        "prose": list(templated(prose)),
        "maths": list(templated(maths)),
    }
