"""Several processes of one service behind one port, by SO_REUSEPORT, with an event loop each.

::

    group      the parent: starts the workers, starts them again, stops them; takes no request
      hub      what workers ask of one another goes through the parent, in one order, over socket pairs
    link       a worker's end: who it is, what it asks of its siblings and answers them

The socket pairs are private: no other process can reach them, whatever the ports require of clients.
"""
