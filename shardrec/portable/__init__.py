"""The sharded forward in operators of torch and fbgemm alone: what runs where shardrec is not installed.

The second spelling of the forward, beside the live one in :mod:`shardrec.exchange` and :mod:`shardrec.modules`, for
saved TorchScript files, torch.export and AOTInductor. It only infers: tables are looked up where they lie and take no
gradient. It has what docs/executors.md says, and refuses the rest with the reason.

::

    input.py        checks and cuts a batch, header and payload
    twin.py         what both twins have: the lookups of this rank's shards, the all-to-all of float rows
    bags.py         a sharded embedding bag collection
    sequences.py    a sharded embedding collection
    frozen_ids.py   maps of dynamic ids, which learn no more
    twins.py        which module has which twin
"""
