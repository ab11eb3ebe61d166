"""``python -m dask_devctx.cli``: the commands of ``dask devctx``."""

from dask_devctx.cli import devctx

if __name__ == "__main__":  # not in the processes that a nanny starts
    devctx(prog_name="python -m dask_devctx.cli")
