"""Several processes of one service behind one port, by SO_REUSEPORT, with an event loop each.

::

    group      the parent: starts, restarts and stops the workers; serves no requests
      hub      passes messages between workers through the parent, in one order, over socket pairs
    link       a worker's end of its socket pair

The socket pairs are private: no other process can reach them, whatever the ports require of clients.
"""
