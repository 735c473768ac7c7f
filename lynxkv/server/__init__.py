"""`lynxkv serve`: answers from remote caches over HTTP, in the forms that OpenAI's clients speak.

    app, hosts, observing     routes; whose requests are answered; ids, log and counts around them
    fields, requests, keys    what is asked for, read and checked; who asks
    openapi                   the document that describes it
    service                   from a request to its answer, with
      names, catalog            names confined to the store; its index by prefix digests
      prompts, tokens           token ids, and what single ones stand for
      admission                 places and memory
      worker, turns             what waits, in turn and together; threads that compute one at a time
      runs, telling             requests alone and together; what clients are told of them
      opening, hot, publishing  caches opened, and kept in memory; prompts encoded in the background
      uncached                  answers to prompts that no cache holds
    outcome, answers, streams answers, in the forms of OpenAI's API, on their way to clients that may leave;
      logprobs                  log probabilities of their tokens
    problems, responses       refusals, and JSON
    page, metrics, serving    the page at `/`; Prometheus; the process

Needs `lynxkv[serve]`.
"""
