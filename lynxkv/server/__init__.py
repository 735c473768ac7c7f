"""`lynxkv serve`: answers from remote caches over HTTP, in the forms that OpenAI's clients speak.

`app` is the way in, `observing` around it; a request passes `requests` (checked), `service` (its cache, its tokens),
`worker` (its turn) and `answers` (its form). Needs `lynxkv[serve]`.
"""
