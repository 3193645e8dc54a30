"""A V2 model server as a library: ``weft.serving.main.main`` runs it as a process. See ``docs/serving.md``.

Layers, each importing only those below it::

    main         arguments and the process
    core         the models of one repository behind the V2 interface
    metrics      Prometheus collectors
    calls        calls from models to other models
    lifecycle    versions: load, reload, unload, on demand; response cache; repository on disk
    runtime      one loaded version: admission (model), dispatch (dispatcher), instances, responses, statistics
    config       config.pbtxt: read, complete, check
    backends     the backend interface, and the Python backend
    scheduler    batchers, deadlines, rate limiter; no I/O, the time is an argument
    queues       queues by policy, stateful sequences; no I/O either
    request      one request, its parts, its stream of responses
    detokenizer  text from token ids
"""
