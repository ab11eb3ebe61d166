"""``dask devctx``: a subcommand of dask's own command line."""

import click

# The configuration comes first, because it decides which devices are simulated.
from dask_devctx import config  # noqa: F401
from dask_devctx.cli.info import info
from dask_devctx.cli.top import top
from dask_devctx.cli.worker import worker


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def devctx() -> None:
    """GPUs of this machine, workers that use them, and clusters of such workers."""


for _command in (info, worker, top):
    devctx.add_command(_command)
