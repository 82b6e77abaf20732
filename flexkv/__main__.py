"""Makes `python -m flexkv` run the `flexkv` command."""

from flexkv.cli.main import run

run()
