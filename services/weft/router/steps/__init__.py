"""Steps of a running graph, with their policies and guards.

A ``Step`` runs one chain of actions, built at load, with only those wrappers that the plan asks for::

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
