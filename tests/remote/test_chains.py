"""Chains on real servers: spans load as one, and are followed while they are written."""

from __future__ import annotations

import threading
import uuid

import pytest
import torch

import lynxkv
from lynxkv.choices import TransportName
from lynxkv.encoder import EncodeReport
from lynxkv.fetch import FetchOptions
from lynxkv.integrations.hf import Model
from lynxkv.testing.servers import Server
from lynxkv.testing.tiny_models import tiny_model

TRANSPORTS: tuple[TransportName, ...] = ("fsspec", "obstore")
IDS = torch.randint(3, 48, (450,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def follow_while_writing(model: Model, written: str, read: str, transport: TransportName) -> None:
    """Write a chain at one URL and follow it at another; the writer waits until its first span has been read."""
    go_on = threading.Event()

    def on_span(report: EncodeReport) -> None:
        go_on.wait(30)

    def write() -> None:
        lynxkv.encode_prompt(model, IDS, written, span_tokens=150, on_span=on_span)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with lynxkv.open(read, follow=True, options=FetchOptions(transport=transport, follow_s=30)) as reader:
            assert reader.is_growing
            go_on.set()
            followed = lynxkv.generate(reader, model, [5, 6], max_new_tokens=8)
            assert [span.part.stop for span in reader.spans] == [150, 300, 450]
    finally:
        go_on.set()
        writer.join(30)
    with lynxkv.open(read, options=FetchOptions(transport=transport)) as reader:
        assert lynxkv.generate(reader, model, [5, 6], max_new_tokens=8).token_ids == followed.token_ids
    assert lynxkv.load(read, tokens=200).token_ids == IDS[:200]
    assert lynxkv.check(read).tokens == 450


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_on_s3(transport: TransportName, s3: str, model: Model) -> None:
    pytest.importorskip(transport)
    folder = f"{s3}/{uuid.uuid4().hex}"
    follow_while_writing(model, f"{folder}/a.lynx", f"{folder}/a.lynx", transport)
    report = lynxkv.encode_prompt(model, [*IDS, 5, 6, 7], f"{folder}/b.lynx")
    assert report.continued_tokens == 450
    assert [entry.tokens for entry in lynxkv.list_caches(folder)] == [150, 300, 450, 453]
    with pytest.raises(lynxkv.InputError, match=r"continued by b\.lynx"):
        lynxkv.remove(f"{folder}/a.lynx")
    assert lynxkv.prune(folder, max_bytes=0).removed == ()
    assert len(lynxkv.remove_chain(f"{folder}/b.lynx")) == 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_over_http(transport: TransportName, http: Server, model: Model) -> None:
    pytest.importorskip(transport)
    folder = uuid.uuid4().hex
    assert http.folder is not None
    follow_while_writing(model, str(http.folder / folder / "a.lynx"), f"{http.url}/{folder}/a.lynx", transport)
