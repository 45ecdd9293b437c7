"""The `turbomill` command: errors become one line on stderr and an exit code."""

from __future__ import annotations

import sys

from turbomill.errors import TurbomillError


def main() -> None:
    """Run the command line; exit with 0, 1 (failure), 2 (usage) or 130 (interrupted)."""
    from click.exceptions import Abort, ClickException, Exit

    from turbomill.cli import cli

    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        cli(standalone_mode=False, prog_name="turbomill")
    except TurbomillError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exit as done:
        sys.exit(done.exit_code)
    except ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"; see `{context.command_path} --help`" if context else ""
        print(f"error: {error.format_message().rstrip('.')}{hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        print(
            f"error: {type(error).__name__}: {error} (a bug in turbomill; --debug shows the traceback)",
            file=sys.stderr,
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
