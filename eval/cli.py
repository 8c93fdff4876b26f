"""The whole command line: the service's commands, and those of the floor above: `demo`, `calibrate`, `eval`."""

from __future__ import annotations

from cacheblend.service.cli import main as service_cli

from . import cli_calibrate, cli_demo, cli_eval

service_cli.app.command("demo")(cli_demo.demo)
service_cli.app.command("calibrate")(cli_calibrate.calibrate)
service_cli.app.add_typer(cli_eval.app, name="eval")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see `cacheblend.service.cli.main.main`."""
    service_cli.main(arguments)


if __name__ == "__main__":
    main()
