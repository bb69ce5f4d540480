"""The command line, ``python -m vramlab plan|run|gpus|lab``; without a command it says what this machine has.

Each command takes ``--json`` and then prints one object; its keys are `vramlab.answers.SCHEMAS` and stand in ``--help``.

Exit status: 0 it fits (``plan``), or it is done; 1 it does not fit, or ran out of memory; 2 bad input, or no answer, with
one line on stderr (``--traceback`` shows where); 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from vramlab import answers
from vramlab.recipe import Recipe, choices
from vramlab.units import parse_bytes
from vramlab.virtual import planner

EPILOG = (
    "exit status: 0 it fits, or is done; 1 it does not fit, or ran out of memory; "
    "2 bad input or no answer, one line on stderr; 130 after Ctrl-C"
)


class UsageError(Exception):
    """What stands on the command line makes no sense."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit status.

    Args:
        arguments: the words after ``python -m vramlab``; None: those of this process.

    Raises:
        SystemExit: after ``--help`` and ``--version``.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = parsed(words)
        status: int = options.act(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if "--traceback" in words:
            traceback.print_exc()
        _say(_one_line(error))
        return 2
    return status


# The words


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {self.prog} --help says more.")


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options in the words.

    Raises:
        UsageError: an unknown option or command, a value that cannot be read, no model.
    """
    top, commands = _parsers()
    options, unknown = top.parse_known_args(words)
    if unknown:
        chosen = commands[options.command] if options.command else top
        flags = [flag for action in chosen._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=3, cutoff=0.6)
        chosen.error(f"unknown {unknown[0]!r}" + (f", the nearest: {', '.join(near)}" if near else ""))
    return options


def recipe_of(options: argparse.Namespace) -> Recipe:
    """The Recipe that was given; options that were not have its defaults.

    Raises:
        ValueError: values out of range or in conflict.
    """
    return Recipe(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Recipe) if hasattr(options, f.name)})


@functools.cache
def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """The parser, and those of the commands."""
    style = functools.partial(argparse.RawDescriptionHelpFormatter, width=answers.WIDTH)
    about = "See, predict and shrink the GPU memory of a training step. Without a command: what this machine has."
    options: dict[str, Any] = {"formatter_class": style, "allow_abbrev": False}
    top = _Parser("python -m vramlab", description=_fill(about), epilog=_fill(EPILOG), **options)
    top.add_argument("--version", action="version", version=str(answers.about("")["vramlab"]))
    top.set_defaults(act=_describe, command=None)
    commands = top.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    built = {}
    for name, act, about in (
        ("plan", _plan, "What a training step needs on a card that need not be here, and whether it fits (the exit status)."),
        ("run", _run, "Train for some steps, on this machine or on a virtual card, and measure."),
        ("gpus", _gpus, "The cards whose figures are known."),
        ("lab", _lab, "Open the notebooks in JupyterLab; with --json only say how."),
    ):
        epilog = f"{_fill(EPILOG)}\n\n{answers.schema_help(name)}"
        usage = f"python -m vramlab {name} {'MODEL [option ...]' if name in ('plan', 'run') else '[option ...]'}"
        built[name] = commands.add_parser(name, usage=usage, help=about, description=_fill(about), epilog=epilog, **options)
        built[name].prog = f"python -m vramlab {name}"
        built[name].set_defaults(act=act)
        built[name].add_argument("--json", action="store_true", help="print one JSON object, described below")
        built[name].add_argument("--traceback", action="store_true", help="where an error comes from, before its line")
    _add_plan(built["plan"])
    _add_run(built["run"])
    return top, built


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--gpu", metavar="CARD", help="card, one of 'python -m vramlab gpus' (default: this machine's)")
    parser.add_argument("--in-use", metavar="SIZE", default="0", help="what others hold of the card, such as '0.8 GiB' (default: 0)")
    parser.add_argument("--max-micro-batch", action="store_true", help="find the largest micro-batch that fits, too")
    parser.add_argument("--changes", action="store_true", help="plan single changes to the recipe, and list the best, too")
    _add_recipe(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps, at least 3 for a throughput (default: 20)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, or a card, which is a virtual one (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, data and dropout (default: 0)")
    _add_recipe(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a built-in name (gpt2-xl, llama-8b, vit-b-16, resnet18, nano, ...; an unknown one lists them), the path of a Hugging Face "
        "config.json (needs transformers; nothing is downloaded; trained from scratch with its own loss, parameters in float32), or "
        "module:factory, which returns a vramlab.Task and is found in the working directory",
    )
    parser.add_argument("--sequence", type=int, metavar="TOKENS", help="of one item, for models of text (default: the longest, or 2048)")


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    """A flag for every option of Recipe, with its docstring."""
    group = parser.add_argument_group("recipe")
    hints, told = get_type_hints(Recipe), _docstrings(Recipe)
    for field in dataclasses.fields(Recipe):
        how: dict[str, Any]
        if choices(field.name):
            how = {"choices": choices(field.name)}
        elif hints[field.name] is bool:
            how = {"action": argparse.BooleanOptionalAction}
        else:
            how = {"type": int if hints[field.name] is int else float, "metavar": "N" if hints[field.name] is int else "X"}
        text = f"{told[field.name]} (default: {field.default})".replace("%", "%%")
        group.add_argument(f"--{field.name.replace('_', '-')}", default=argparse.SUPPRESS, help=text, **how)


def _docstrings(cls: type) -> dict[str, str]:
    """Field -> the text that follows it in the source, which Python does not keep."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for before, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
            text = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
            found[before.target.id] = " ".join(text.split())
    return found


# The commands


def _describe(options: argparse.Namespace) -> int:
    from vramlab.devices import describe

    for name, value in describe().items():
        print(f"{name:26}{value}")
    return 0


def _plan(options: argparse.Namespace) -> int:
    recipe, card, held = recipe_of(options), _card(options.gpu), parse_bytes(options.in_use)
    with _apart(options):
        planner.shared().submit(os.getpid)  # it starts while torch is imported here
        from vramlab.named import named_task
        from vramlab.planning import plan

        found = plan(named_task(options.model, options.sequence), recipe, card, held)
        answer = answers.plan_answer(options.model, found, max_micro_batch=options.max_micro_batch, changes=options.changes)
    cards = str(card) if recipe.ranks == 1 else f"{recipe.ranks} x {card}"
    title = f"{found.task.name}\n{recipe}\nplanned for {cards}" + (f", of which others hold {options.in_use}" if held else "")
    _print(answer, answers.plan_text(answer, title), options)
    return 0 if found.fits else 1


def _run(options: argparse.Namespace) -> int:
    recipe = recipe_of(options)
    virtual = not options.device.partition(":")[0].isalpha()  # cards have digits in their names
    device = _card(options.device) if virtual else options.device
    status, report = 0, None
    with _apart(options):
        from vramlab import experiments
        from vramlab.named import named_task

        task, progress = named_task(options.model, options.sequence), sys.stderr.isatty()
        try:
            done = experiments.run(task, recipe, steps=options.steps, device=device, seed=options.seed, progress=progress)
        except Exception as error:
            if not _is_out_of_memory(error) or not hasattr(error, "run"):
                raise
            done, status, report = error.run, 1, getattr(error, "report", None)
            _say(" ".join(str(error).split()))
        answer = answers.run_answer(options.model, done, report)
    text = answers.run_text(answer, f"{task.name}\n{recipe}\n{experiments.where(done.device)}")
    _print(answer, text if report is None else f"{text}\n\n{answers.wrapped(str(report))}", options)
    return 130 if done.status == "interrupted" else status


def _is_out_of_memory(error: Exception) -> bool:
    # On the CPU torch raises a plain RuntimeError, and NumPy a MemoryError.
    return type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _gpus(options: argparse.Namespace) -> int:
    from vramlab import gpus

    answer = answers.gpus_answer(gpus.cards())
    _print(answer, answers.gpus_text(answer), options)
    return 0


def _lab(options: argparse.Namespace) -> int:
    answer = _lab_answer()
    if options.json:
        print(json.dumps(answer, indent=2))
        return 0
    if lacking := answers.lab_text(answer):
        raise UsageError(lacking)
    with subprocess.Popen(answer["command"]) as server:
        try:
            return server.wait()
        except KeyboardInterrupt:  # which the server got too, and now ends
            server.wait()
            raise


def _lab_answer() -> dict[str, Any]:
    """The command of the Makefile's ``make lab``, for this Python."""
    folders = [folder for folder in (Path.cwd(), Path(__file__).parents[1]) if (folder / "notebooks" / START).is_file()]
    notebooks = str(folders[0] / "notebooks") if folders else None
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    command = [sys.executable, "-m", "jupyterlab", "-y", f"--ServerApp.root_dir={notebooks}", f"--LabApp.default_url=/lab/tree/{START}"]
    if hasattr(os, "getuid") and os.getuid() == 0:
        command.append("--allow-root")
    if sys.platform == "linux" and not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")):
        command.append("--no-browser")
    ready = not missing and notebooks is not None
    return answers.about("lab") | {"ready": ready, "missing": missing, "notebooks": notebooks, "command": command if ready else []}


START = "00_start_here.ipynb"
NEEDED = {"jupyterlab": "jupyterlab", "ipywidgets": "ipywidgets", "matplotlib": "matplotlib", "PIL": "pillow", "sklearn": "scikit-learn"}
"""Module -> package of the extra ``lab``."""


def _card(name: str | None) -> Any:
    """A card by its name, or this machine's.

    Raises:
        UsageError: no such card, several of that name, none here.
    """
    from vramlab import gpus

    try:
        return gpus.gpu(name)
    except ValueError as error:
        if name is None:
            raise UsageError("There is no CUDA card in this machine: name one, such as --gpu 'RTX 4090'.") from error
        if " fits " in str(error):
            raise
        raise UsageError(f"No card {name!r} is known{_nearest_cards(name)}. 'python -m vramlab gpus' lists them.") from error


def _nearest_cards(name: str) -> str:
    from vramlab import gpus

    plain = {card.name.lower().removeprefix("rtx "): card.name for card in gpus.cards()}
    wanted = re.sub(r"nvidia|geforce|rtx", "", name.lower()).strip()
    near = difflib.get_close_matches(wanted, plain, n=3, cutoff=0.4)
    return f"; the nearest: {', '.join(plain[n] for n in near)}" if near else ""


# What is written


def _apart(options: argparse.Namespace) -> Any:
    """What the user's code prints stays out of the JSON."""
    return redirect_stdout(sys.stderr) if options.json else nullcontext()


def _print(answer: dict[str, Any], text: str, options: argparse.Namespace) -> None:
    print(json.dumps(answer, indent=2, allow_nan=False) if options.json else text)


def _say(line: str) -> None:
    print(f"vramlab: {line}", file=sys.stderr)


def _one_line(error: Exception) -> str:
    """The message; of an error that vramlab did not raise itself also its kind and the user's line."""
    text, where = " ".join(str(error).split()), _where(error)
    if type(error).__name__ == "PlannerError":
        text = str(error).partition(" Its last lines:")[0]
    if isinstance(error, UsageError) or where is None:
        return text or type(error).__name__
    return f"{type(error).__name__}{where}: {text}".removesuffix(": ")


def _where(error: BaseException) -> str | None:
    """Where an error comes from, in the user's code; None for one that vramlab raised."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    link: BaseException | None = error
    while link is not None:
        if type(link).__name__ == "RemoteTraceback":  # of the planner process, as text
            frames += [(file, int(line)) for file, line in re.findall(r'File "(.+?)", line (\d+)', str(link))]
        link = link.__cause__
    own, installed = f"{Path(__file__).parent}{os.sep}", [sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")]
    if frames and frames[-1][0].startswith(own):
        return None
    users = [f" at {file}:{line}" for file, line in frames if not file.startswith((own, "<", *installed))]
    return users[-1] if users else ""


def _fill(text: str) -> str:
    return textwrap.fill(text, answers.WIDTH)
