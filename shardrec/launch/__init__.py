"""Start, watch and end ranks: as processes of this host, or those that a launcher such as torchrun started.

::

    run.py              run a function on each rank of a launcher, or on new ranks
    processes.py        rank processes: start, watch, end
    ranks.py            this process as a rank: device, threads, process group
    stop.py             SIGTERM and Ctrl-C as a request to end after the current step
    quiet.py            silence other libraries' warnings during a run

Its names are imported at their first use, because a process that only starts others needs no torch. It also has what a
program needs to begin (``check_versions``), what ranks use to agree (``exchange/agree.py``), and :func:`peers`,
which names the ranks that others wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardrec._late_imports import names_from
from shardrec._versions import EXTRAS, check_extra, check_versions

if TYPE_CHECKING:
    from shardrec.exchange.agree import all_gather, on_first_rank, on_threads, over_ranks, same_everywhere
    from shardrec.exchange.peers import peers
    from shardrec.exchange.safe_pickle import gather
    from shardrec.exchange.shared.handshake import host_identity
    from shardrec.launch.processes import RankProcesses, end_with_launcher, spawn_alone
    from shardrec.launch.quiet import environment_for_torch, quiet_libraries
    from shardrec.launch.ranks import RankInfo, check_exchange, joined_run, meet
    from shardrec.launch.run import launched_rank, on_new_ranks, run_on_ranks
    from shardrec.launch.stop import RunStopped, StopRequest
    from shardrec.native import has_operators

__all__ = [
    "EXTRAS",
    "RankInfo",
    "RankProcesses",
    "RunStopped",
    "StopRequest",
    "all_gather",
    "check_exchange",
    "check_extra",
    "check_versions",
    "end_with_launcher",
    "environment_for_torch",
    "gather",
    "has_operators",
    "host_identity",
    "joined_run",
    "launched_rank",
    "meet",
    "on_first_rank",
    "on_new_ranks",
    "on_threads",
    "over_ranks",
    "peers",
    "quiet_libraries",
    "run_on_ranks",
    "same_everywhere",
    "spawn_alone",
]

_HOMES, __getattr__ = names_from(
    __name__,
    {
        "shardrec.launch.processes": "RankProcesses end_with_launcher spawn_alone",
        "shardrec.launch.quiet": "environment_for_torch quiet_libraries",
        "shardrec.launch.ranks": "RankInfo check_exchange joined_run meet",
        "shardrec.launch.run": "launched_rank on_new_ranks run_on_ranks",
        "shardrec.launch.stop": "RunStopped StopRequest",
        "shardrec.exchange.agree": "all_gather on_first_rank on_threads over_ranks same_everywhere",
        "shardrec.exchange.peers": "peers",
        "shardrec.exchange.safe_pickle": "gather",
        "shardrec.exchange.shared.handshake": "host_identity",
        "shardrec.native": "has_operators",
    },
)
