"""Start, watch and end ranks: as processes of this host, or those that a launcher such as torchrun started.

::

    run.py          run a function on each rank of a launcher, or on new ranks
    processes.py    rank processes: start, watch, end
    ranks.py        this process as a rank: device, threads, process group
    stop.py         SIGTERM and Ctrl-C as a request to end after the current step
    quiet.py        silence other libraries' warnings during a run
"""
