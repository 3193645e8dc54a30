"""What a step does beside acting once: attempts, hedges, answers kept, copies that nobody waits for.

``retry_budget``, ``answer_cache``, ``single_flight``, ``shared_answers`` and ``shadow_pool`` know nothing of steps;
``attempt``, ``retry``, ``hedge`` and ``cache`` are actions around the action of a step.
"""
