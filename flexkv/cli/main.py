"""The `flexkv` command: finds its subcommands by name and imports only the one that is used."""

from __future__ import annotations

import importlib
import sys

import click
from rich.console import Console
from rich.markup import escape

import flexkv
from flexkv.cli.output import OutputError, checked_output
from flexkv.config.names import nearest
from flexkv.errors import FlexKVError
from flexkv.native_core import missing_core
from flexkv.observe.package import package_folder

COMMANDS: dict[str, tuple[str, str]] = {
    "bench": ("flexkv.cli.bench_command", "Measure how fast this machine copies."),
    "config": ("flexkv.cli.config_command", "Show or document the settings."),
    "disk": ("flexkv.cli.disk_command", "Show or delete what the disk tier keeps."),
    "fsck": ("flexkv.cli.fsck_command", "Verify every page on disk, and repair the index with --repair."),
    "info": ("flexkv.cli.info_command", "Show what this build and this machine can do."),
    "peers": ("flexkv.cli.peers_command", "Show which running units share pages on this machine."),
    "remote": (
        "flexkv.cli.remote_command",
        "Check the store of the remote tier, measure it, and inspect its values.",
    ),
    "simulate": (
        "flexkv.cli.simulate_command",
        "Run the cache manager through everything that can go wrong.",
    ),
}
"""Maps each command to (module with a click command named `command`, one line of help)."""

USAGE_EXIT_CODE = 2


class LazyGroup(click.Group):
    """A group that imports a command when it is used, so that `flexkv config` does not import all other commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            near = None if ctx.resilient_parsing else nearest(cmd_name, COMMANDS)
            if near is not None:
                ctx.fail(f"No such command {cmd_name!r}. Did you mean {near!r}?")
            return None
        module, _ = COMMANDS[cmd_name]
        command = importlib.import_module(module).command
        assert isinstance(command, click.Command), module
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    flexkv.__version__, prog_name="flexkv", message=f"%(prog)s %(version)s from {package_folder()}"
)
def cli() -> None:
    """KV-cache transfer engine for LLM inference."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    If flexkv raises one of its own errors, the native core is missing, or output cannot be written, prints a message
    and returns 2.
    """
    try:
        with checked_output():
            result = cli.main(args=arguments, prog_name="flexkv", standalone_mode=False)
    except OutputError as error:
        return _say(str(error))
    except FlexKVError as error:
        return _say(str(error))
    except ImportError as error:
        if (missing := missing_core(error)) is None:
            raise
        return _say(str(missing))
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    return result if isinstance(result, int) else 0


def _say(message: str) -> int:
    lines = "\n".join(" ".join(line.split()) for line in message.splitlines())
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {escape(lines)}")
    return USAGE_EXIT_CODE


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == "__main__":
    run()
