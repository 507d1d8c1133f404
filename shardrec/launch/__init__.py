"""Ranks: started as processes of this host, watched and ended together, or those of a launcher such as torchrun.

::

    run.py          a function on each rank, of a launcher or started by shardrec
    processes.py    ranks as processes: started, watched, ended
    ranks.py        this process as a rank: device, threads, process group
    stop.py         signals as a request to end
    quiet.py        libraries that would talk into a run
"""
