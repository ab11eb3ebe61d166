"""Many tasks of every kind while everything breaks; each result is checked.

Devices are simulated, or with ``--gpus`` real ones, where CuPy makes the values.

Run it with ``make soak``. A scheduler, and some hosts with several workers each, run batches of
tasks: small and large values that go between devices, workers and hosts, values beyond the limit of
device memory, tasks of several devices and of a part of one, coroutines, tasks without a device.

Meanwhile faults happen: workers and whole hosts are killed or stand still, devices break with and
without a guilty task, memory runs out, hosts lose their network, and the scheduler is restarted.
Only the tasks that broke a device may err. Everything else must give its right value. At the end
nothing may be left in device memory.

The hosts are network namespaces where this process is root. Elsewhere they are addresses of the
loopback device, whose network does not fail.

Tasks, faults and the moments of the faults follow from ``--seed``, but not the moment at which a
thread meets a fault. Most tasks are submitted with others of their shape, in one graph; some alone.
SIGINT and SIGTERM have no more tasks begin: the table comes when those under way have ended.
``memory`` compares the growth of each process's memory with dask's own, without this package.
"""
