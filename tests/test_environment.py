"""The files that set the project up agree with one another and hold nothing of the machine they were written on."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")

# A path may follow a quote, a space or "file://", not a host name or a longer path.
MACHINE_PATH = re.compile(r"(?<![\w.~-])(/(?:wor[k]|roo[t]|home)/|/tm[p]/[A-Za-z])")


def test_environment_has_the_projects_name_and_only_known_keys() -> None:
    assert set(ENVIRONMENT) == {"name", "channels", "dependencies"}
    assert ENVIRONMENT["name"] == PROJECT["name"]


def test_environment_takes_nothing_from_the_default_channel() -> None:
    assert ENVIRONMENT["channels"] == ["conda-forge", "nodefaults"]


def test_conda_makes_python_and_pip_only() -> None:
    conda = [d for d in ENVIRONMENT["dependencies"] if isinstance(d, str)]
    assert [re.split(r"[=<>! ]", d)[0] for d in conda] == ["python", "pip"]
    assert conda[0].split("=")[-1] in SpecifierSet(PROJECT["requires-python"])


def test_pip_installs_this_project_with_extras_that_exist() -> None:
    (pip,) = [d["pip"] for d in ENVIRONMENT["dependencies"] if isinstance(d, dict)]
    assert pip == ["-e .[lab,models,test]"]
    assert {"lab", "models", "test"} <= set(PROJECT["optional-dependencies"])


def test_the_makefile_installs_extras_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"-e '\.\[([\w,]+)\]'", makefile) == ["lab,models", "lab,models,test"]


def test_readme_names_both_commands() -> None:
    assert "make lab" in README
    assert "make test" in README


def test_the_licence_is_the_one_named() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert re.match(r"\s*Apache License\s+Version 2\.0, January 2004", text)


def test_no_file_holds_a_path_of_one_machine() -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    found = []
    for file in (ROOT / name for name in names if name):
        if not file.is_file():  # deleted, not yet committed
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture
            continue
        lines = enumerate(text.splitlines(), 1)
        found += [f"{file.relative_to(ROOT)}:{number}: {line.strip()}" for number, line in lines if MACHINE_PATH.search(line)]
    assert found == []


def test_a_machine_path_is_recognised() -> None:
    for name in ("work", "root", "home"):
        assert MACHINE_PATH.search(f'open("/{name}/file")')
        assert MACHINE_PATH.search(f"file:///{name}/file")
        assert not MACHINE_PATH.search(f"https://example.org/{name}/file")
    assert MACHINE_PATH.search("/tmp" + "/x")
