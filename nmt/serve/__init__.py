"""The page to try models, and the service over HTTP.

Begin with `app.py`, the routes, then `service.py`, what a request does; `batcher.py` shares batches between requests,
`guard.py` and `connections.py` refuse what does not belong, `static/` is the page.
"""
