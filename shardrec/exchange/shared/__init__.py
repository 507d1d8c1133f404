"""The exchange between ranks of one host, through shared memory.

::

    windows      memory that a rank owns and its peers map           (windows.py)
    channel      small messages between ranks: what lies where       (channel.py)
    handshake    who shares a host, and how they find each other     (handshake.py)
    collectives  the exchanges of a step over both                   (collectives.py)
"""
