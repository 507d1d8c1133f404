"""The exchange between ranks of one host, through shared memory.

::

    windows      memory that a rank owns and its peers map           (windows.py)
    channel      small messages between ranks: positions of data     (channel.py)
    handshake    finds the ranks that share a host                   (handshake.py)
    collectives  the exchanges of a step over both                   (shared_memory.py)
"""
