"""Steps of a running graph, and what may go wrong with one.

A ``Step`` runs one chain of actions, made when the graph is loaded, with the wrappers alone that the plan asks for::

    Step             when -> action -> fallbacks -> soft, defaults -> error
      Limited        max_inflight -> min_remaining_ms -> timeout_ms
        Cached
          Retried
            Hedged
              Attempt          a number and a span for each call
                Limited        of a node: max_inflight
                  CallAction | StreamAction | NodeAction

A ``ShadowStep`` runs a step in the background.
"""
