"""What a forward of the sharded modules and its backward do, in the order in which data flows.

::

    one rank    read → check → cut → look up → assemble
    ranks       read → check → cut → [header and ids] → look up → [rows] → assemble
    backward    distribute → [gradients] → update

Plain functions over two records: a :class:`~shardrec.step.step_plan.StepPlan`, which is made at ``shard()`` and holds
all that does not depend on the batch, and an :class:`~shardrec.step.records.InFlight` for each call of a module.
"""
