"""Replicas of a sharded model: copies of its tables, which are averaged every few steps.

::

    replicas.py          the option, the process groups, and the averaging of the copies
    replicated_model.py  the model with replicas that are ranks of one process group
    elastic.py           the agreement between jobs, each a replica, that come and go
    elastic_model.py     the model with such jobs as replicas
"""

from __future__ import annotations

from shardrec.replicas.elastic_model import ElasticModel
from shardrec.replicas.replicas import ReplicaGroups, Replicas
from shardrec.replicas.replicated_model import ReplicatedModel

__all__ = ["ElasticModel", "ReplicaGroups", "Replicas", "ReplicatedModel"]
