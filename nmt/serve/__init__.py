"""The service over HTTP, and its page, on which users try the models.

Begin with `app.py`, which has the routes. Then read `service.py`, which answers requests: their sentences wait in one
queue and are translated in batches. `server.py` refuses requests that the rules do not allow, and runs the server.
`static/` holds the page.
"""
