"""Entry point of the command: what needs no torch starts without it, everything else is in `cli.py`."""

import sys

LIGHT = ("report", "merge")


def main() -> None:
    """Runs `difftest report` and `difftest merge` by themselves, any other command through the whole application."""
    if len(sys.argv) < 2 or sys.argv[1] not in LIGHT:
        from .cli import main as whole

        whole()
        return
    import typer

    from .report_cli import report_command
    from .scale_cli import merge_command

    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command("report")(report_command)
    app.command("merge")(merge_command)
    app(prog_name="difftest")
