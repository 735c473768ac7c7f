"""`lynxkv serve`: answer from the caches of a store over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lynxkv.choices import CONCURRENCY, OnFailure
from lynxkv.errors import InputError
from lynxkv_cli._errors import UsageProblem
from lynxkv_cli._models import ModelChoice
from lynxkv_cli._options import (
    CACHE_MAX_BYTES,
    CacheDir,
    CacheMaxBytes,
    Concurrency,
    Device,
    Json,
    Model,
    ModelDtypeOption,
    Quiet,
    ResidualUrl,
    parse_link,
    parse_size,
)
from lynxkv_cli._output import Output

HELP = """Example: lynxkv serve . --model smollm2

Serve answers from the caches under a folder or prefix, over HTTP, as OpenAI's API has it.

A request names its cache in `"lynx": {"cache": "reports/may.lynx"}`, relative to the store; without one the
longest stored prefix of its prompt is used, or the prompt is prefilled. Only verified text is sent; a stream
with `"lynx": {"draft": true}` also tells of drafts. docs/serve.md has the rest.

SIGTERM and Ctrl-C let running requests finish. With --json the one object on stdout is printed when the
server answers; its log goes to stderr.
"""


def serve(
    store: Annotated[str, typer.Argument(metavar="URL", help="The folder or prefix that the caches are under.")],
    model: Model = None,
    model_dtype: ModelDtypeOption = "float32",
    device: Device = "cpu",
    host: Annotated[str, typer.Option(metavar="HOST", help="Where to listen; loopback by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8000,
    queue: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests that may run and wait together; more get 503.")
    ] = 64,
    batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests that are decoded together; 1: each alone.")
    ] = 8,
    runs: Annotated[
        int, typer.Option(metavar="N", min=1, help="Runs that compute in turns, of a request or more.")
    ] = 4,
    deadline: Annotated[
        float, typer.Option(metavar="SECONDS", help="Give a request up after this, waiting included.")
    ] = 300.0,
    drain: Annotated[
        float, typer.Option(metavar="SECONDS", help="What running requests get when the server is stopped.")
    ] = 30.0,
    memory: Annotated[
        int, typer.Option(metavar="MIB", min=1, help="What runs may take beside the model's weights.")
    ] = 4096,
    hot: Annotated[
        int, typer.Option(metavar="MIB", min=0, help="Memory for caches that were used lately, of remote stores.")
    ] = 1024,
    concurrency: Concurrency = CONCURRENCY,
    residual_url: ResidualUrl = None,
    cache_dir: CacheDir = None,
    cache_max_bytes: CacheMaxBytes = CACHE_MAX_BYTES,
    refresh: Annotated[float, typer.Option(metavar="SECONDS", help="How often the store is listed.")] = 30.0,
    publish: Annotated[
        bool, typer.Option("--publish", help="Encode and publish prompts that no cache held, in the background.")
    ] = False,
    on_failure: Annotated[
        OnFailure, typer.Option(help="What to do when the cache that a request names cannot be loaded.")
    ] = "error",
    api_keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take only requests with one of these keys; docs/serve.md has the form."),
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="RATE[/RTT]", help="Read over a simulated link, such as 200mbit/20ms.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="The longest answer.")] = 2048,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Serve the caches under `store`."""
    output = Output.of(as_json=as_json, quiet=quiet)
    if model is None:
        raise UsageProblem("a server needs a model", hint="add --model smollm2")
    from lynxkv.server.keys import Keys
    from lynxkv.server.options import ServeOptions

    options = ServeOptions(
        host=host,
        port=port,
        queue=queue,
        batch=batch,
        runs=runs,
        deadline_s=deadline,
        drain_s=drain,
        memory_bytes=memory << 20,
        hot_bytes=hot << 20,
        concurrency=concurrency,
        residual_url=residual_url,
        cache_dir=cache_dir,
        cache_max_bytes=parse_size(cache_max_bytes),
        refresh_s=refresh,
        publish=publish,
        on_failure=on_failure,
        max_new_tokens=max_new_tokens,
    )
    simulated = parse_link(link)
    keys = Keys() if api_keys is None else Keys.read(api_keys)
    try:
        import prometheus_client  # noqa: F401

        from lynxkv.server.serving import Server, listen, url_of
    except ImportError as error:
        raise InputError(f"serving needs {error.name}", hint="pip install 'lynxkv[serve]'") from error
    from lynxkv.store.prefix import Store, file_system

    file_system(store)
    if residual_url is not None:
        Store.of_residuals(residual_url)
    listener = listen(options)

    loaded = ModelChoice(ref=model, dtype=model_dtype, device=device).load(output.note)

    from lynxkv.server.app import create_app
    from lynxkv.server.observing import log_to_stderr
    from lynxkv.server.service import Service

    service = Service(loaded, store, options, keys, simulated)

    def ready() -> None:
        url = url_of(listener)
        output.result({"url": url, "model": service.model_name, "store": store})
        output.data(url)
        sys.stdout.flush()
        output.note(f"serving {service.model_name} over {store} at {url}/v1; Ctrl-C stops")

    log_to_stderr(quiet=quiet)
    Server(create_app(service), options, ready).run_until_stopped(listener)
