"""The page at `/`: it loads nothing, and in a browser of a phone's size a draft turns solid or is struck through."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lynxkv
from lynxkv.integrations.hf import Model, suffix
from tests.server.conftest import running
from tests.server.test_operations import get

if TYPE_CHECKING:
    from tests.server.conftest import Running


def test_the_page_is_one_file(server: Running) -> None:
    status, headers, body = get(server, "/")
    text = body.decode()
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/html")
    assert not re.findall(r"""(?:src|href|url\(|@import|//)\s*=?\s*["']?(?:https?:|//)""", text)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    # What a model writes is text, never markup.
    assert not re.findall(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text)


@pytest.fixture
def browser() -> Any:
    """A headless Chromium, where there is one."""
    api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if program is None:
        pytest.skip("chromium-headless-shell is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.slow
def test_a_question_in_a_browser(model: Model, store: Path, browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = lynxkv.generate
    monkeypatch.setattr("lynxkv.server.runs.generate", partial(generate, speculate=8))
    # Drafts on the Anchor alone: what arrives between them depends on the machine.
    monkeypatch.setattr("lynxkv.arriving.ArrivingCache.take_ready", lambda self: None)
    for question in (f"w{number} w8 w9" for number in range(5, 48)):
        with lynxkv.open(store / "docs" / "report.lynx") as reader:
            own = generate(reader, model, suffix(model.tokenizer, question), max_new_tokens=20, speculate=8)
        if 0 < own.accepted < own.drafted:
            break
    page = browser.new_page(viewport={"width": 390, "height": 844})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    with running(model, str(store), max_new_tokens=20) as server:
        page.goto(server.url)
        page.wait_for_selector("#cache option[value='docs/report.lynx']", state="attached")
        page.fill("#question", question)
        page.click("#ask")
        page.wait_for_selector("#figures b")
        solid = "".join(page.locator("#answer .yes").all_text_contents())
        wrong = page.locator("#answer .no").count()
        assert solid == own.text
        assert wrong == own.drafted - own.accepted
        assert page.locator("#answer .draft").count() == 0
        assert f"{own.accepted} of {own.drafted}" in page.inner_text("#figures")
        for track in ("anchor", "residual", "draft-track", "verify", "plain"):
            assert page.locator(f".track.{track} i").count() > 0, track
        # Nothing is wider than the phone.
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        # What cannot be answered is said.
        page.evaluate("document.getElementById('cache').options[0].value = 'none.lynx'")
        page.select_option("#cache", "none.lynx")
        page.click("#ask")
        page.locator("#problem", has_text="none.lynx").wait_for()
        assert [text for text in said if "404" not in text] == []
