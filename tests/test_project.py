"""The documents, examples, lock files and the demo agree with the code.

A fenced block that follows ``<!-- file: NAME -->`` is that file; tests write it and use it.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs
import pytest

from reconciled.cli.main import UNBUILT_VERBS, VERBS, _parsed
from reconciled.config import controllers, model
from reconciled.config.load import load
from reconciled.reconcilers.exec import reconciler as exec_module
from reconciled.reconcilers.file import reconciler as file_module

ROOT = Path(__file__).resolve().parents[1]
COMMAND = str(Path(sys.executable).with_name("reconciled"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CONFIGURATIONS = sorted((ROOT / "config").rglob("reconciled.yaml"))


def names(paths: list[Path]) -> list[str]:
    """The names of *paths* as parameters of tests."""
    return [str(path.relative_to(ROOT)) for path in paths]


def reconciled(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    environment = {name: value for name, value in os.environ.items() if name != "STATE_DIRECTORY"}
    return subprocess.run(
        [COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
        env=environment,
    )


def written_files(document: Path, where: str, target: Path) -> list[Path]:
    """Write the files that *document* shows below *where* to *target* instead."""
    written = []
    shown = re.findall(
        r"<!-- file: (\S+) -->\n+```\w+\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE
    )
    for name, text in shown:
        path = Path(name.replace(where, str(target)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(where, str(target)))
        written.append(path)
    make_trusted(target)
    return written


def make_trusted(directory: Path) -> None:
    """Set the modes of umask 022: a configuration that others can write is refused."""
    for path in (directory, *directory.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o022)


# -- the README ------------------------------------------------------------------------------


@pytest.mark.processes
def test_what_the_readme_shows_works(tmp_path: Path) -> None:
    """The files of the README are valid, and have the effects that it describes."""
    site = tmp_path / "hello"
    written = written_files(ROOT / "README.md", "/tmp/hello", site)
    assert len(written) == 5
    configuration = site / "reconciled.yaml"
    checked = reconciled("--config", configuration, "check", "--strict")
    assert (checked.returncode, checked.stderr) == (0, "")
    planned = reconciled("--config", configuration, "plan")
    assert planned.returncode == 1
    assert not (site / "greeting.txt").exists()
    ran = reconciled("--config", configuration, "run", "--once")
    assert ran.returncode == 0, ran.stderr
    assert (site / "greeting.txt").read_text() == "Hello.\n"
    assert (site / "motd.txt").read_text() == "Changes are made in Git.\n"
    (site / "greeting.txt").write_text("Changed by hand.\n")
    assert reconciled("--config", configuration, "run", "--once").returncode == 0
    assert (site / "greeting.txt").read_text() == "Hello.\n"
    (site / "resources/greeting.yaml").unlink()
    assert reconciled("--config", configuration, "run", "--once").returncode == 0
    assert not (site / "greeting.txt").exists()


@pytest.mark.processes
def test_the_mistake_in_the_readme_reads_so(tmp_path: Path) -> None:
    """The README shows the actual message for its mistake."""
    site = tmp_path / "hello"
    configuration = written_files(ROOT / "README.md", "/tmp/hello", site)[0]
    configuration.write_text(configuration.read_text().replace(": file", ": fiel"))
    shown = re.findall(r"^/tmp/hello/.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    told = reconciled("--config", configuration, "check").stderr.replace(str(tmp_path), "/tmp")
    assert shown[0] in told.splitlines()


def test_the_readme_has_every_verb() -> None:
    """The README's table has every implemented verb, and no other."""
    text = (ROOT / "README.md").read_text()
    listed = set(re.findall(r"^\| `([a-z]+)[^`]*` \|", text, re.MULTILINE))
    assert listed == set(VERBS)
    assert not listed & set(UNBUILT_VERBS)


def test_the_readme_is_short() -> None:
    """The README's prose can be read in six minutes, at 300 words a minute."""
    prose = re.sub(
        r"^```.*?^```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    assert len(prose.split()) < 1800


# -- the other documents ---------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_what_is_quoted_stands_there(document: Path) -> None:
    """A block that follows ``<!-- from: FILE -->`` is in that file, line by line."""
    shown = re.findall(
        r"<!-- from: (\S+) -->\n+```\w+\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE
    )
    assert shown or "<!-- from:" not in document.read_text()
    assert [name for name, text in shown if text not in (ROOT / name).read_text()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_links_lead_somewhere(document: Path) -> None:
    """A link in a document leads to a file of the project, and to a heading that is there."""
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (heading and heading not in headings(path)):
            lost.append(target)
    assert lost == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_tests_that_are_cited_exist(document: Path) -> None:
    """Each test that a document names exists; ``…`` abbreviates the rest of a name."""
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    cited = re.findall(r"`(test_\w+)(…?)`", document.read_text())
    assert [n for n, rest in cited if f"def {n}{'' if rest else '('}" not in sources] == []


def headings(document: Path) -> set[str]:
    """The anchors of *document*."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.processes
def test_what_the_tutorial_shows_works(tmp_path: Path) -> None:
    """The files of docs/plugins.md are valid, and the test that they hold passes."""
    site = tmp_path / "site"
    written = written_files(ROOT / "docs/plugins.md", "/tmp/site", site)
    assert written
    checked = reconciled("--config", site / "reconciled.yaml", "check", "--strict")
    assert (checked.returncode, checked.stderr) == (0, "")
    tests = [path for path in written if path.name.startswith("test_")]
    assert tests
    arguments = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, tests)]
    ran = subprocess.run(
        arguments, cwd=site, capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """What docs/reconcilers.md shows for steps, as files."""
    place = tmp_path / "image"
    assert len(written_files(ROOT / "docs/reconcilers.md", "/tmp/image", place)) == 2
    (place / "source").write_text("1")
    return place


@pytest.mark.processes
def test_the_program_with_steps_works(image: Path) -> None:
    """The program that docs/reconcilers.md shows makes the image so, once for each change."""
    configuration = image / "reconciled.yaml"
    configuration.write_text(
        "state: state\ncontrollers: {c: {reconciler: exec, watch: [{directory: resources}]}}\n"
    )
    make_trusted(image)
    for count, text in enumerate(("1", "2"), 1):
        (image / "source").write_text(text)
        for _ in range(2):
            ran = reconciled("--config", configuration, "run", "--once")
            assert ran.returncode == 0, ran.stderr
        assert (image / "image").read_text() == text
        assert len((image / "news").read_text().splitlines()) == count


@pytest.mark.processes
@pytest.mark.parametrize("done", ["", "copied", "switched", "announced"])
def test_the_program_with_steps_goes_on(image: Path, done: str) -> None:
    """It begins behind the last step, and may be killed between a step and its note."""
    noted = image / "noted"
    (image / "reconciled").write_text(f'#!/bin/sh\necho "$2" >> "{noted}"\n')
    (image / "reconciled").chmod(0o755)
    environment = {"PATH": f"{image}:{os.environ['PATH']}", "RECONCILED_OPERATION": "ID"}
    if done:
        # Nothing but the note is missing, or not even that.
        (image / "image").write_text("1")
        (image / "news").write_text("a new image (ID)\n")
    arguments = ["sh", "apply"]
    environment["RECONCILED_STEP"] = done
    ran = subprocess.run(arguments, cwd=image, env=environment, timeout=60, check=False)
    assert ran.returncode == 0
    steps = ["copied", "switched", "announced"]
    rest = steps[steps.index(done) + 1 :] if done else steps
    assert (noted.read_text().splitlines() if noted.exists() else []) == rest
    assert (image / "image").read_text() == "1"
    assert (image / "news").read_text() == "a new image (ID)\n"


def commands_in_documents() -> Iterator[tuple[str, list[str]]]:
    """Each ``reconciled …`` in a block of a document that is for a shell, and where it stands."""
    for document in DOCUMENTS:
        for block in re.findall(
            r"^```sh\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL
        ):
            for line in block.splitlines():
                for command in re.split(r"&&|\|\|", line):
                    words = shlex.split(command, comments=True)
                    if words[:1] == ["reconciled"]:
                        yield f"{document.name}: {line}", words[1:]


def test_commands_in_documents_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line takes every command that a document shows, and none is unbuilt."""
    shown = list(commands_in_documents())
    assert len(shown) > 10
    wrong = []
    for where, arguments in shown:
        try:
            parsed = _parsed(arguments)
        except SystemExit:
            wrong.append(f"{where}: {capsys.readouterr().err}")
        else:
            assert parsed.verb not in UNBUILT_VERBS, where
    assert wrong == []


def events_in_code() -> set[str]:
    """Event names of log lines: literal texts of the form ``word.word`` in a call that logs."""
    logging = {
        "debug",
        "info",
        "warning",
        "error",
        "critical",
        "log_from_thread",
        "line",
        "_emit",
        "_log_outcome",
        "_log_recovery",
        "_log_source",
        "render",
    }
    form = re.compile(r"[a-z]+\.[a-z_]+")
    found = set()
    for path in (ROOT / "reconciled").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts: list[ast.AST] = []
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")[2]
                if called in logging or called.startswith("getattr("):
                    parts = list(node.args)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "event":
                parts = [node.value]
            found |= {
                each.value
                for part in parts
                for each in ast.walk(part)
                if isinstance(each, ast.Constant)
                and isinstance(each.value, str)
                and form.fullmatch(each.value)
            }
    return found


def test_every_event_is_documented() -> None:
    """docs/logs.md explains each event that the code can log, and no other."""
    text = (ROOT / "docs/logs.md").read_text()
    documented = set(re.findall(r"^\| `([a-z]+\.[a-z_]+)` \|", text, re.MULTILINE))
    in_code = events_in_code()
    assert len(in_code) > 30
    assert sorted(in_code - documented) == []
    assert sorted(documented - in_code) == []


def keys_of(cls: Any, prefix: str = "") -> Iterator[str]:
    """Every key that may be written for the attrs class *cls*, dotted."""
    hints = get_type_hints(cls)
    for field in attrs.fields(cls):
        hint = hints[field.name]
        kinds = [hint] if get_origin(hint) is Literal else [hint, *get_args(hint)]
        inner = next((kind for kind in kinds if isinstance(kind, type) and attrs.has(kind)), None)
        yield prefix + field.name
        if inner is not None:
            yield from keys_of(inner, f"{prefix}{field.name}.")


def documented_keys(document: str) -> set[str]:
    """The keys in the first columns of the tables of *document*."""
    text = (ROOT / "docs" / document).read_text()
    return set(re.findall(r"^\| `([a-z_.*]+)` \|", text, re.MULTILINE))


def test_every_key_of_the_configuration_is_documented() -> None:
    """docs/configuration.md has a row for each key, and for no other."""
    sections = {
        "log": model.LogConfig,
        "stop": model.StopConfig,
        "limits": model.LimitsConfig,
        "journal": model.JournalConfig,
        "http": model.HttpConfig,
        "control": model.ControlConfig,
        "plugins": model.PluginsConfig,
        "controllers.*": controllers._RawController,
    }
    keys = {"state", "include", "controllers.*"}
    for name, cls in sections.items():
        keys |= set(keys_of(cls, f"{name}."))
    # A section that holds nothing but others needs no row.
    keys -= {"journal.history", "controllers.*.retry", "controllers.*.removals"}
    watches = {"directory", "every", "cron", "zone", "every.interval", "every.jitter"}
    keys |= {f"controllers.*.watch.{name}" for name in watches}
    assert documented_keys("configuration.md") == keys


def test_every_field_of_the_built_in_kinds_is_documented() -> None:
    """docs/reconcilers.md has a row for each field of File and Exec, and for no other."""
    fields = set(keys_of(file_module.File)) | set(keys_of(file_module.FileOptions))
    fields |= set(keys_of(exec_module.Exec)) - {"critical"}
    assert documented_keys("reconcilers.md") == fields


# -- config ----------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=names(CONFIGURATIONS))
def test_examples_are_valid(configuration: Path, tmp_path: Path) -> None:
    """Each configuration in config/ passes check, with its manifests and plugins."""
    copy = tmp_path / "copy"
    shutil.copytree(configuration.parent, copy)
    make_trusted(copy)
    checked = reconciled("--config", copy / "reconciled.yaml", "check")
    assert checked.returncode == 0, checked.stderr
    declared = re.search(r"^manifests +ok, (\d+)", checked.stdout, re.MULTILINE)
    assert declared is not None
    assert int(declared[1]) > 0


def test_the_commented_example_shows_the_defaults(tmp_path: Path) -> None:
    """Every value in config/reconciled.yaml is the default, but for what it calls an example."""
    shutil.copytree(ROOT / "config", tmp_path / "config")
    make_trusted(tmp_path)
    shown = load(tmp_path / "config/reconciled.yaml", {}).config
    least = tmp_path / "config/least.yaml"
    least.write_text(
        "state: /var/lib/reconciled\n"
        "plugins: {directories: [/etc/reconciled/plugins]}\n"
        "controllers:\n"
        "  files:\n"
        "    reconciler: file\n"
        "    watch:\n"
        "      - directory: resources\n"
        "      - every: 10m\n"
        '      - {cron: "0 4 * * *", zone: Europe/Berlin}\n'
        "    options: {root: /}\n"
    )
    assert load(least, {}).config == shown
    assert file_module.FileOptions().root == "/"


def test_the_commented_example_names_every_key() -> None:
    """Each key of the configuration is in config/reconciled.yaml, maybe as a comment."""
    text = (ROOT / "config/reconciled.yaml").read_text()
    last = {key.rpartition(".")[2] for key in documented_keys("configuration.md")} - {"*"}
    assert sorted(name for name in last if not re.search(rf"\b{name}:", text)) == []


# -- the rest --------------------------------------------------------------------------------


def test_the_lock_can_build_the_project() -> None:
    """The lock has the build requirements, so that no isolated build bypasses it."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    lines = (ROOT / "requirements/build.in").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == wanted
    for lock in ("run.txt", "dev.txt"):
        assert re.search(r"^setuptools==", (ROOT / "requirements" / lock).read_text(), re.MULTILINE)


def test_the_locks_agree_and_have_hashes() -> None:
    """Both locks have one version of each package, with hashes, and dev.txt has all of run.txt."""
    locks = {}
    for name in ("run.txt", "dev.txt"):
        text = (ROOT / "requirements" / name).read_text()
        pinned = re.findall(r"^([\w.-]+)==(\S+)(.*(?:\n +--hash=.*)*)", text, re.MULTILINE)
        assert all("--hash=sha256:" in rest for _, _, rest in pinned)
        locks[name] = {package: version for package, version, _ in pinned}
        assert len(locks[name]) == len(pinned)
    assert locks["run.txt"].items() <= locks["dev.txt"].items()


def test_fragments_of_the_changelog_are_short() -> None:
    """A file in changes/ is NAME.KIND.md, with one to three lines."""
    for path in (ROOT / "changes").iterdir():
        assert re.fullmatch(r"[a-z0-9-]+\.(feature|fix|removal|security)\.md", path.name)
        assert 1 <= len(path.read_text().splitlines()) <= 3, path.name


@pytest.mark.processes
def test_the_demo_shows_what_it_claims() -> None:
    """The demo succeeds within its time, and leaves no directory behind."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "config/demo/demo.py")],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    place = re.search(r"Everything happens in (\S+),", ran.stdout)
    assert place is not None
    assert not Path(place[1]).exists()
    took = re.search(r"That was all, in (\d+) s", ran.stdout)
    assert took is not None
    assert int(took[1]) <= 100
