"""Gives millions of strange inputs; only documented answers and errors may come back.

Run as ``make fuzz``. Pieces of right input, numbers at their limits, other scripts' digits, white
space and plain noise are combined at random. They are given to the readers of
``CUDA_VISIBLE_DEVICES``, of the ``device`` annotation and of the configuration, and to all that
reads what comes by the network: workers' messages to the scheduler and to each other, the
scheduler's to workers, the metrics and histories of workers, and headers of transfers with the
handles of another process's memory.
"""
