"""The page of the devices as one HTML file, for a look at it on a machine with a browser."""

from __future__ import annotations

from typing import Any


async def page_file(dask_scheduler: Any) -> str:
    """Return the present page; for ``client.run_on_scheduler``."""
    from bokeh.document import Document
    from bokeh.embed import file_html
    from bokeh.layouts import column
    from bokeh.resources import INLINE

    from dask_devctx.scheduler.dashboard import page
    from dask_devctx.scheduler.history import DeviceHistory

    history = DeviceHistory.of(dask_scheduler)
    assert history is not None
    await history.collect()
    document = Document()
    page.fill(dask_scheduler, document, page.PLOTS)
    theme, plots = document.theme, list(document.roots)
    document.clear()
    for plot in plots:
        plot.update(sizing_mode="stretch_width", height=320)
    html: str = file_html(
        column(*plots, sizing_mode="stretch_width"), INLINE, "Devices", theme=theme
    )
    return html
