"""README, docs and examples say what is so: links, names, commands, code, the rooms and their files, the exit codes."""

from __future__ import annotations

import ast
import functools
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import farflung
from farflung import __version__
from farflung.console.main import app
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import exit_codes
from farflung.simulator.laboratory.places import places_in
from rig.waiting import LONG_S

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rooms import FOLDERS, PURE_MODULES, ROOMS, ROOT, modules

# One process has what all of these parse; three would each parse it.
pytestmark = pytest.mark.xdist_group("house: sources")

PLACES = (*FOLDERS, "docs", "tests", "examples", "benchmarks")
MODULES = [module.file for module in modules()]
FOLDERS_OF_MODULES = sorted({path.parent for path in MODULES})
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [
    README,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(DOCS.glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted(page for room in FOLDERS for page in (ROOT / room).rglob("README.md")),
]
MODULES_WITHOUT_README = 5  # a room with more of them has a page of its own
# Names in code spans that are no file of ours: what a reader makes, or has.
MADE_BY_READERS = {"run.toml", "train.py", "config.json", "adapter_config.json"}
# Classes of others, and message names that are written as they stand on the wire.
FOREIGN = {"Dockerfile", "GradScaler", "DataParallel", "DistributedDataParallel", "SFTTrainer", "Write"}


def every_page(test: Callable[[Path], None]) -> Callable[[], None]:
    """One test for all of them: as many as there are pages would take longer to hand out than to run."""

    def over_all_pages() -> None:
        for page in PAGES:
            test(page)

    return over_all_pages


def complain(problems: list[str]) -> None:
    if problems:
        pytest.fail("\n" + "\n".join(problems), pytrace=False)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language or "", text) of each fenced block."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def spans(page: Path) -> list[str]:
    """What stands between backticks outside the blocks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


# ---- files and names ---------------------------------------------------------------------------------------


def headings(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]
    problems = []
    for link in links:
        file, _, place = link.partition("#")
        there = page.parent / file if file else page
        if not there.exists():
            problems.append(f"{page.name}: {link} is not there")
        elif place and place not in headings(there):
            problems.append(f"{page.name}: {link}: no heading of that page")
    complain(problems)


@every_page
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    with_folder = re.findall(rf"(?<![\w./-])(?:{'|'.join(PLACES)})/[\w./-]*\w", text)
    alone = [span for span in spans(page) if re.fullmatch(r"\w+\.(py|toml|md|svg|json)", span)]
    homes = [page.parent, ROOT, *FOLDERS_OF_MODULES]
    missing = {name for name in with_folder if not (ROOT / name).exists()}
    missing |= {n for n in alone if n not in MADE_BY_READERS and not any((h / n).exists() for h in homes)}
    complain([f"{page.name} names {name}, which is not there" for name in sorted(missing)])


def test_files_that_remarks_in_the_code_name_exist() -> None:
    folders = ("tests", "examples", "benchmarks", "docs")
    files = {*MODULES, *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))}
    there = "\n".join(f"/{path.relative_to(ROOT).as_posix()}" for path in files) + "\n"
    problems = []
    for path in MODULES:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if '"' in line.replace('"""', ""):
                continue  # what the program writes, not a remark
            for name in re.findall(r"(?<![\w./*{}-])(?:[a-z_]+/)*[a-z_]+\.py\b", line):
                if f"/{name}\n" not in there:
                    problems.append(f"{path.relative_to(ROOT)}:{number} names {name}, which is not there")
    complain(problems)


@functools.cache
def names_in_the_rooms() -> tuple[dict[str, set[str]], set[str]]:
    """(class -> names inside it, every function and constant)."""
    classes: dict[str, set[str]] = {}
    others: set[str] = set()
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                inside = classes.setdefault(node.name, set())
                for each in ast.walk(node):
                    if isinstance(each, ast.FunctionDef):
                        inside.add(each.name)
                    elif isinstance(each, ast.Name):
                        inside.add(each.id)
                    elif isinstance(each, ast.Attribute):
                        inside.add(each.attr)
            elif isinstance(node, ast.FunctionDef):
                others.add(node.name)
            elif isinstance(node, ast.Name):
                others.add(node.id)
    return classes, others


@every_page
def test_classes_and_functions_that_are_named_exist(page: Path) -> None:
    classes, others = names_in_the_rooms()
    problems = []
    for span in spans(page):
        owner, dot, member = span.partition(".")
        if dot and owner in classes and member.isidentifier() and member not in classes[owner]:
            problems.append(f"{page.name}: {owner} has no {member}")
        elif re.fullmatch(r"[A-Z]+[a-z]\w*|_[a-z]\w+|[A-Z]+_[A-Z_]+", span):
            known = span in classes or span in others or span in FOREIGN or span.startswith("FARFLUNG_")
            kind = span.removesuffix("_...")
            if not known and kind not in others:
                problems.append(f"{page.name}: nothing is called {span}")
    complain(problems)


def test_the_front_page_answers_first_and_is_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert 5_000 <= len(text.encode()) <= 7_000
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings[:4] == ["Can I use it?", "Limits of today", "Start", "In your own script"]
    assert len(re.findall(r"!\[", text)) == 1


# ---- the rooms -----------------------------------------------------------------------------------------------


def files_of(page: Path) -> list[Path]:
    """The modules that the table of a room's README names, each by its path from there."""
    rows = re.findall(r"^\|.*\|$", page.read_text(encoding="utf-8"), re.M)
    return [page.parent / name for row in rows for name in re.findall(r"`((?:\w+/)*\w+\.py)`", row)]


def test_the_readme_of_a_room_names_each_of_its_modules_once() -> None:
    """A room with few modules has no page of its own: they stand on that of the room around it."""
    problems: list[str] = []
    due: dict[Path, list[Path]] = {ROOT / folder / "README.md": [] for folder in FOLDERS}
    for room in FOLDERS_OF_MODULES:
        own = [path for path in MODULES if path.parent == room]
        page = room / "README.md"
        if not page.is_file():
            if len(own) > MODULES_WITHOUT_README:
                problems.append(f"{room.relative_to(ROOT)}/ has {len(own)} modules and no README.md")
            page = room.parent / "README.md"
        due.setdefault(page, []).extend(own)
    for page, own in due.items():
        label = page.relative_to(ROOT)
        if not page.is_file():
            problems.append(f"{label} is not there")
            continue
        listed = files_of(page)
        problems += [f"{label} lacks {path.name}" for path in own if path not in listed]
        problems += [f"{label} names {path.name}, which is not there" for path in listed if path not in own]
        problems += [f"{label} names {path.name} twice" for path in set(listed) if listed.count(path) > 1]
    complain(problems)


def test_the_readme_of_a_room_is_short_and_says_where_to_start_and_what_is_pure() -> None:
    problems = []
    for page in (page for page in PAGES if page.relative_to(ROOT).parts[0] in FOLDERS):
        room = page.parent.relative_to(ROOT).as_posix()
        text = page.read_text(encoding="utf-8")
        if not 8 <= text.count("\n") <= 30:
            problems.append(f"{room}/README.md has {text.count(chr(10))} lines")
        intro = " ".join(text.partition("\n|")[0].split())
        if not intro.startswith(f"# {room} ") or "Start with" not in intro:
            problems.append(f"{room}/README.md does not begin with its name, or says not where to start")
        if room in ROOMS and ROOMS[room].pure != ("The room is pure" in intro):
            problems.append(f"{room}/README.md should say that it is pure, or not")
        told = re.search(r"((?:`\w+\.py`(?:, | and )?)+) (?:is|are) pure", intro)
        pure = {f"{room}/{name}" for name in re.findall(r"`(\w+)\.py`", told[1] if told else "")}
        due = {name for name in PURE_MODULES if name.rpartition("/")[0] == room}
        if pure != due:
            problems.append(f"{room}/README.md: pure are {', '.join(sorted(due)) or 'none'}, says rooms.py")
    complain(problems)


def test_the_table_of_rooms_is_that_of_the_tests() -> None:
    """docs/architecture.md says in its third column what rooms.py allows, and in its fourth what is pure."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Rooms")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+)` \|([^|]+)\|([^|]*)\|([^|]*)\|$", table, re.M)
    assert [room for room, *_ in rows] == list(ROOMS)
    problems = [f"{room}: nobody lives there" for room, who, _, _ in rows if not who.strip()]
    for room, _, may, pure in rows:
        names = [
            f"`{each}.py`" if (ROOT / f"{each}.py").is_file() else f"`{each}`" for each in ROOMS[room].may
        ]
        cell = ", ".join(names) or "nothing"
        if may.strip() != cell:
            problems.append(f"{room}: write {cell}")
        if pure.strip() != ("yes" if ROOMS[room].pure else ""):
            problems.append(f"{room}: write {'yes' if ROOMS[room].pure else 'nothing'} under pure")
    complain(problems)


def test_the_tour_is_short() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    tour = text.partition("## Follow one round")[2].partition("\n## ")[0]
    steps = re.findall(r"^(\d)\. \[([\w/.]+)\]\(\.\./\2\)", tour, re.M)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert 5 <= len({name for _, name in steps}) == len(steps) <= 8


def test_the_tables_of_promises_and_exit_codes_are_whole() -> None:
    text = (DOCS / "reliability.md").read_text(encoding="utf-8")
    promises = re.findall(r"^\| (P\d+) \|.*\| (tests/[^|]*) \|$", text, re.M)
    assert [name for name, _ in promises] == [f"P{number}" for number in range(1, 22)]
    section = (
        (DOCS / "operate.md").read_text(encoding="utf-8").partition("## Exit codes")[2].partition("\n## ")[0]
    )
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.M)}
    assert told == {value for value in vars(exit_codes).values() if isinstance(value, int)}


def test_the_page_of_the_api_is_what_its_script_writes() -> None:
    made = runpy.run_path(str(DOCS / "make_api.py"))["page"]()
    assert (DOCS / "api.md").read_text(encoding="utf-8") == made, "run python docs/make_api.py"
    headings = re.findall(r"^## (.*)$", made, re.M)
    assert {name.replace("\\", "") for name in headings} == set(farflung.__all__)
    public = {name for name in vars(farflung.Run) if not name.startswith("_")}
    told = set(re.findall(r"^### Run\.(\w+)$", made, re.M)) | set(re.findall(r"^\| `(\w+)` \|", made, re.M))
    assert public <= told and {"optimizer", "name"} <= told


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert named == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


def test_every_command_stands_on_its_page() -> None:
    there = set(commands_of_the_program())
    page = DOCS / "commands.md"
    told = [words[0] for words in command_lines(page)]
    told += [span.split()[1] for span in spans(page) if span.startswith("farflung ")]
    assert set(told) == there


def test_messages_that_are_quoted_are_in_the_program() -> None:
    """The column "the message says" of docs/models.md; `...` stands for a value."""
    constants = {
        node.value
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    table = (
        (ROOT / "docs/models.md")
        .read_text(encoding="utf-8")
        .partition("the message says")[2]
        .partition("\n\n")[0]
    )
    quoted = [
        span for row in table.splitlines() for span in re.findall(r"`([^`]+)`", row.split(" | ", 1)[-1])
    ]
    assert len(quoted) > 8
    pieces = [(span, piece.strip()) for span in quoted for piece in span.split("...") if piece.strip()]
    complain(
        [f"docs/models.md: {span!r} is not what the program says" for span, piece in pieces
         if not any(piece in text for text in constants)]
    )  # fmt: skip


# ---- commands and code ---------------------------------------------------------------------------------------


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words of each `farflung ...` line of a block, without its comment."""
    for language, text in blocks(page):
        if language in ("", "sh", "bash", "console"):
            for line in text.splitlines():
                line = line.removeprefix("$ ")
                if line.startswith("farflung "):
                    yield shlex.split(line, comments=True)[1:]


@functools.cache
def commands_of_the_program() -> dict[str, Any]:
    return dict(get_command(app).commands)  # type: ignore[attr-defined]


def problem_with(words: list[str], whole: bool) -> str | None:
    """What the command line would say; with `whole`, also about words that are missing."""
    commands = commands_of_the_program()
    if not words or words[0] not in commands:
        return f"there is no command {words[:1]}"
    try:
        commands[words[0]].make_context(words[0], words[1:], resilient_parsing=not whole)
    except Exception as error:  # the parser's own errors have no public home
        return str(error)
    return None


@every_page
def test_commands_parse(page: Path) -> None:
    found = [(words, True) for words in command_lines(page)]
    found += [(shlex.split(span)[1:], False) for span in spans(page) if span.startswith("farflung ")]
    problems = [(words, problem_with(list(words), whole)) for words, whole in found]
    complain([f"{page.name}: farflung {shlex.join(w)}: {problem}" for w, problem in problems if problem])


def test_commands_in_the_examples_parse() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        for line in (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines():
            if line.startswith("farflung "):
                assert problem_with(shlex.split(line.partition("   ")[0])[1:], whole=True) is None, line


@every_page
def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    text = "\n".join([*spans(page), *(text for _, text in blocks(page))])
    assert set(re.findall(r"^make ([a-z-]+)", text, re.M)) <= targets


@every_page
def test_modules_that_are_run_exist(page: Path) -> None:
    named = re.findall(r"python -m farflung\.([\w.]*\w)", page.read_text(encoding="utf-8"))
    files = [Path(*name.split(".")).with_suffix(".py") for name in named]
    complain([f"{page.name}: no {file.as_posix()}" for file in files if not (ROOT / file).is_file()])


@every_page
def test_options_of_benchmarks_exist(page: Path) -> None:
    """Whoever wants to see a figure again types what the page says."""
    text = "\n".join([*spans(page), *(text for _, text in blocks(page))])
    for script, options in re.findall(r"(benchmarks/[\w/]+\.py)([^\n;|]*)", text):
        known = "".join(path.read_text(encoding="utf-8") for path in (ROOT / script).parent.rglob("*.py"))
        known += "".join(f'"--{each.replace("_", "-")}"' for each in re.findall(r"(\w+): Annotated\[", known))
        complain(
            [
                f"{script} has no {each}"
                for each in re.findall(r"--[\w-]+", options)
                if f'"{each}"' not in known
            ]
        )


def test_figures_that_are_checked_for_drift_stand_on_their_pages_and_in_what_was_printed() -> None:
    """One that was reworded would never be compared again."""
    drift = runpy.run_path(str(ROOT / "benchmarks" / "drift.py"))
    for figure in drift["FIGURES"]:
        found = drift["numbers_in"]((DOCS / figure.page).read_text(encoding="utf-8"), figure.row)
        assert len(found) == figure.printed.count("{}"), figure
        assert (ROOT / figure.command.split()[0]).is_file()
    figure = drift["Figure"](
        "page.md", "command", "| a row | {} | {_} % | {} |", "row {}  {}%", times=(1, 100)
    )
    page, drift_of = "| another | 1 | 2 % | 3 |\n| a row | 1,000 | 2 % | 52.5 |\n", drift["drift_of"]
    assert drift_of(figure, page, "head\nrow   1001    0.53%\n") == []
    assert drift_of(figure, page, "row 1000 0.5%") == [f"docs/page.md: {figure.row}: 52.5 there, 50 now"]
    assert drift_of(figure, page, "column 1000 0.5%") == [
        "docs/page.md: 0 lines are like 'row {}  {}%', one was expected"
    ]


@every_page
def test_code_compiles(page: Path) -> None:
    for language, text in blocks(page):
        if language == "python":
            compile(text, str(page), "exec")


def test_examples_are_short_and_their_runs_are_valid() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 60, path
    for path in (ROOT / "examples").glob("*_run.toml"):
        Manifest.from_toml(path.read_text(encoding="utf-8"), path.name)
    assert len(places_in(ROOT / "examples/home_lines.toml")) == 8


def test_an_example_that_lacks_something_says_so_and_is_not_started_again() -> None:
    code = "import runpy, sys; sys.modules['transformers'] = None; runpy.run_path(sys.argv[1])"
    example = str(ROOT / "examples/finetune_hf.py")
    done = subprocess.run(
        [sys.executable, "-c", code, example], capture_output=True, text=True, timeout=LONG_S
    )
    assert done.returncode == exit_codes.USAGE and "needs transformers: pip install" in done.stderr


# ---- the quick start, as it is written -------------------------------------------------------------------------

RUN_HERE = {"init": [], "coordinate": ["--listen", "127.0.0.1:0"], "status": []}
LOOKING = {"status", "doctor", "export"}  # these end by themselves and change nothing

NEEDS_A_PACKAGE = {
    "--tensorboard",
    "--wandb",
    "run.png",
}  # run by test_export.py and test_recording.py where it is there


def quick_start() -> list[list[str]]:
    return list(command_lines(README))


@functools.cache
def words_of_tests() -> set[str]:
    """Every string in the tests that start real processes, and in the demo, which is one of them."""
    found = set()
    others = [
        ROOT / "tests" / name
        for name in (
            "checkpoints/test_store.py",
            "console/test_audit.py",
            "console/test_simulate.py",
            "coordinator/run/test_operator_orders.py",
            "peer/adapters/test_publish.py",
        )
    ]
    for path in (*(ROOT / "tests" / "real").glob("*.py"), *others):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_every_command_that_is_named_is_run_by_tests() -> None:
    run = set(RUN_HERE) | LOOKING | words_of_tests()
    named = {words[0] for page in PAGES for words in command_lines(page)}
    assert named <= run, f"no test runs farflung {', '.join(sorted(named - run))}"


def test_the_quick_start_is_run_by_tests() -> None:
    """What is not run below is run in tests/real/."""
    elsewhere = words_of_tests()
    lines = [line for _, text in blocks(README) for line in text.splitlines()]
    assert sum(1 for line in lines if line.startswith(("farflung", "make"))) == 5, "make demo, four commands"
    assert [words[0] for words in quick_start()] == ["init", "coordinate", "join", "status"]
    assert {words[0] for words in quick_start()} <= elsewhere | set(RUN_HERE)


def _once(words: list[str]) -> list[str]:
    """`--watch` ends with the run, and this one goes on."""
    return [word for word in words if word != "--watch" or "--replay" in words]


def look_as_the_pages_say(url: str, folder: Path) -> None:
    """Every command of every page that only looks, with every option that a page gives it."""
    recorded = folder / "recorded"
    recorded.mkdir()
    start = {"wall": 1.0, "event": "start", "role": "coordinator", "run": "my-run", "rules": {"rounds": 2}}
    commit = {"wall": 2.0, "event": "committed", "round": 1, "version": 1, "members": ["a"], "weights": [1.0]}
    lines = [json.dumps(start), json.dumps(commit | {"fragment": 0, "tokens": 9, "loss": 2.0, "tx_bytes": 5})]
    (recorded / "events.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    meant = {
        "URL": url,
        "FOLDER": str(recorded),
        "frame.svg": str(folder / "frame.svg"),
        "run.svg": str(folder / "x.svg"),
        "run.data": str(recorded),
    }
    named = {tuple(words) for page in PAGES for words in command_lines(page) if words[0] in LOOKING}
    named = {words for words in named if not NEEDS_A_PACKAGE & set(words)}
    for words in sorted(named):
        filled = [meant.get(word, word) for word in words[1:]]
        done = CliRunner().invoke(app, [words[0], *_once(filled)])
        assert done.exit_code == 0, (words, done.output, done.exception)


def test_the_glossary_names_classes_that_stand_once() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("## Rooms")[0]
    rows = [
        line.split("|")[1:4] for line in text.splitlines() if line.startswith("| ") and "---" not in line
    ][1:]
    found = Counter(name for path in MODULES for name in re.findall(r"(?m)^class (\w+)", path.read_text()))
    named = [name for _, _, classes in rows for name in re.findall(r"`(\w+)`", classes)]
    assert len(rows) >= 40
    complain(
        [
            f"the glossary names {name}, which {found[name]} classes are called"
            for name in named
            if found[name] != 1
        ]
    )


@pytest.mark.slow
def test_the_quick_start_runs(tmp_path: Path) -> None:
    farflung = [sys.executable, "-m", "farflung"]

    def call(words: list[str]) -> str:
        done = subprocess.run(
            [*farflung, *words], cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    status = next(words for words in command_lines(DOCS / "commands.md") if "--json" in words)
    assert status[0] == "status"
    first, second, *rest = [*quick_start(), status]
    call(first)
    with (tmp_path / "log").open("w") as log, subprocess.Popen(
        [*farflung, second[0], *RUN_HERE[second[0]], *second[1:]],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True,
    ) as coordinator:  # fmt: skip
        try:
            assert coordinator.stdout is not None
            url = coordinator.stdout.readline().strip()
            assert url.startswith("farflung://"), (url, (tmp_path / "log").read_text())
            for words in rest:
                if words[0] in RUN_HERE:
                    filled = _once([url if word == "URL" else word for word in words[1:]])
                    shown = call([words[0], *RUN_HERE[words[0]], *filled])
                    assert ("my-run" if "--json" in words else "version 0/100 waiting") in shown
                    if "--json" in words:
                        assert json.loads(shown)["version"] == 0
            look_as_the_pages_say(url, tmp_path)
        finally:
            coordinator.terminate()


def test_the_version_is_told() -> None:
    """docs/security.md asks for it in reports."""
    told = CliRunner().invoke(app, ["--version"])
    assert told.exit_code == 0 and told.stdout.startswith(f"farflung {__version__} (protocol ")
