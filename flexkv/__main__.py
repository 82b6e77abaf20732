"""`python -m flexkv` is the `flexkv` command."""

from flexkv.cli.main import run

run()
