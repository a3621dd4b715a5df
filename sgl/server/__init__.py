"""The HTTP server: programs and OpenAI's API over one engine.

Owns everything between a socket and `sgl.runtime.Engine`; an adapter, without state of its own that an engine would
miss. Rooms inside, in the order in which a request passes them:

    transport.py   bytes to requests: header size, header and keep-alive times (uvicorn)
    guard.py       every request: id, host, draining, the access log, errors that nobody caught
    routes.py      the table of routes: who may call (tier), what the body is, errors in the route's shape
    bodies.py      a body to a checked value: size, time, depth, unknown fields
    running.py     a program on the engine as an asyncio stream: back-pressure, disconnects
    openai/ native.py programs.py ...   what each route means
    playground/    a page at / to try all of it with
    app.py         all of it as one ASGI application
    serve.py       the process: engine, ready line, signals, drain, exit status

Nothing here blocks the event loop: what tokenizes, compiles or renders runs in the engine's worker or on a thread.
"""
