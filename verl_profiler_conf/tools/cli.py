"""The command `verl-profiler`. Each sub-command imports what it needs when it runs, so that the help is quick.

Exit status: 0: all is well; 1: something is missing, broken or out of date, or cannot be used as asked; 2: the command
line is wrong, or there is nothing to work on. docs/report.md has it for each command.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from verl_profiler_conf.core.install import pip_install
from verl_profiler_conf.tools.plan.command import add_plan
from verl_profiler_conf.tools.report.command import add_report
from verl_profiler_conf.tools.trace_commands import add_merge, add_open, add_slice

Command = Callable[[argparse.Namespace], int]

TAKE_A_LAUNCH = ("plan", "doctor")

_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (None: that of the process) and return its exit status."""
    given, launch = _split(sys.argv[1:] if argv is None else argv)
    arguments = make_parser().parse_args(given)
    arguments.launch = launch
    run: Command = arguments.run
    try:
        return run(arguments)
    except BrokenPipeError:  # piped into head or less, which left
        sys.stderr.close()
        return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line. The reference in docs/ is made from it."""
    parser = argparse.ArgumentParser(
        prog="verl-profiler", description="Profiler traces of exactly the response tokens asked for."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parser.add_argument(
        "--print-completion",
        action=_Completion,
        choices=("bash", "zsh", "tcsh"),
        help="print a shell's completion script",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (add_report, add_slice, add_merge, add_open, add_plan, _add_doctor, _add_generate):
        add(commands)
    return parser


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own arguments, and those after the first `--`, which are a launch, if the command takes one."""
    if "--" not in argv or argv[0] not in TAKE_A_LAUNCH:
        return list(argv), []
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what would prevent a capture, and how to fix it",
        usage="verl-profiler doctor [options] [-- COMMAND ...]",
        description="With a COMMAND: also what is wrong with that launch, found as by `plan`, without running it."
        " Exit status: 0: nothing is wrong; 1: something is; 2: the command could not be started.",
    )
    parser.add_argument("--ray", metavar="ADDRESS", help="of a Ray cluster: ask each node for this package")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for the launch (default 300)")
    parser.set_defaults(run=_doctor, launch=[], like=None, max_size=None, layers=None)


def _doctor(arguments: argparse.Namespace) -> int:
    from rich.table import Table
    from rich.text import Text

    from verl_profiler_conf.tools.doctor import examine
    from verl_profiler_conf.tools.launch_checks import launch_findings
    from verl_profiler_conf.tools.plan.command import plan_launch
    from verl_profiler_conf.tools.plan.processes import CannotRunError
    from verl_profiler_conf.tools.ray_checks import ray_findings
    from verl_profiler_conf.tools.report.terminal import make_console

    findings = examine()
    if arguments.launch:
        try:
            findings.extend(launch_findings(plan_launch(arguments)))
        except CannotRunError as error:
            return _complain("doctor", str(error))
    if arguments.ray:
        findings.extend(ray_findings(arguments.ray))
    table = Table(show_header=False, box=None)
    for finding in findings:
        text = f"{finding.text}\n  -> {finding.fix}" if finding.fix else finding.text
        table.add_row(Text(finding.state, style=_STYLES[finding.state]), finding.about, Text(text))
    make_console().print(table)
    return 1 if any(finding.state == "error" for finding in findings) else 0


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="write flattened reference configs, or check that they are up to date",
        description="Compose configs as Hydra does and write each into one file (see docs/generate.md).",
    )
    parser.add_argument(
        "spec", nargs="?", type=Path, help="YAML file that says what to generate (default: this package's own)"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; print what differs, and exit 1 if anything does"
    )
    parser.add_argument(
        "--exit-non-zero-on-write", action="store_true", help="exit 1 if a file was written: a commit lacks it"
    )
    parser.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    from verl_profiler_conf.tools.generate import SpecError, check, read_spec, write
    from verl_profiler_conf.tools.generate.spec import OWN_SPEC

    gc.disable()  # thousands of nodes that live to the end: a tenth of the time would go into looking for garbage
    try:
        entries = read_spec(arguments.spec or OWN_SPEC)
        if arguments.check:
            diff = check(entries)
            _print_all(diff)
            if diff:
                again = shlex.join(["verl-profiler", "generate", *([str(arguments.spec)] if arguments.spec else [])])
                print(f"out of date: run `{again}`", file=sys.stderr)
            return 1 if diff else 0
        written = write(entries)
        for path in written:
            print(f"written: {path}")
        return 1 if written and arguments.exit_non_zero_on_write else 0
    except (SpecError, OSError) as error:
        return _complain("generate", str(error))
    finally:
        gc.enable()


def _print_all(text: str) -> None:
    """Print to standard output. The exit status stays as it is when `head` closes the pipe early."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(command: str, line: str) -> int:
    print(f"verl-profiler {command}: {line}", file=sys.stderr)
    return 2


class _Version(argparse.Action):
    """Looks the version up only when it is asked for. argparse's own action would search for it at every start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(version("verl-profiler-conf"))
        except PackageNotFoundError:  # run from a checkout
            print("unknown")
        parser.exit()


class _Completion(argparse.Action):
    """Prints a script for the shell: `eval "$(verl-profiler --print-completion bash)"`."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: object, values: str | Sequence[object] | None, __: str | None = None
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.exit(2, f"verl-profiler: --print-completion needs shtab: {pip_install('report')}\n")
        _complete_files(parser, shtab.FILE)
        print(shtab.complete(parser, str(values)))
        parser.exit()


def _complete_files(parser: argparse.ArgumentParser, how: object) -> None:
    """Complete the names of files wherever an argument is one."""
    for action in parser._actions:
        if action.type is Path:
            vars(action)["complete"] = how
        elif isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, how)


if __name__ == "__main__":
    sys.exit(main())
