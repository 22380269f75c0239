"""The service over HTTP, and its page, on which users try the models.

Begin with `service.py`, which answers requests: their sentences wait in one queue and are translated in batches.
`server.py` has the routes, refuses requests that the rules do not allow, and runs the server. `static/` holds the page.
"""
