"""The command line: ``sketchssm demo | calibrate | plan | evaluate | bench | info``.

Each command is a module, imported when the command is called, so that ``sketchssm --help`` is instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

import sketchssm

__all__ = ["main"]

COMMANDS = {
    "demo": "Calibrate, plan, decode and compare on the shipped traces.",
    "calibrate": "Make plans from traces, or of a whole model.",
    "plan": "Choose map, format, window and ranks for a target, by measurement.",
    "evaluate": "Compare the sketch with every other system on traces, or check plans.",
    "bench": "Time decode systems on this machine's GPU or CPU.",
    "info": "Describe this installation, or a plan file.",
}


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


class _UserError(click.ClickException):
    """An error that the user can correct: one line, and exit code 2."""

    exit_code = 2


class _Commands(click.Group):
    """Commands by name; the module of a command is imported when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"sketchssm.cli.{cmd_name}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Refuse an option that is given twice, where only the last one would have an effect."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            with click.Context(command, info_name=name, parent=ctx, resilient_parsing=True) as own:
                given = command.make_parser(own).parse_args(list(rest))[2]
            for param in given:
                if isinstance(param, click.Option) and not param.multiple and given.count(param) > 1:
                    raise click.UsageError(f"{param.opts[0]}: expected once, got it {given.count(param)} times", own)
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (ValueError, OSError, ModuleNotFoundError) as error:
            # errors of the library about its input; all others are bugs and keep their traceback
            raise _UserError(" ".join(str(error).split())) from error


@click.group(cls=_Commands, context_settings=SETTINGS)
@click.version_option(sketchssm.__version__, prog_name="sketchssm")
def main() -> None:
    """Decode linear-attention layers from compact sketches of their exact recurrent states."""
