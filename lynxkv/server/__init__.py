"""`lynxkv serve`: answers from remote caches over HTTP, in the forms that OpenAI's clients speak.

`app` is the way in; a request passes `requests` (checked), `service` (which cache, which tokens), `worker` (its turn)
and `answers` (its form). Needs `lynxkv[serve]`.
"""
