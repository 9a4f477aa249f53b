"""`make test-page`: the web page in headless Chromium, with screenshots in HEADRACE_PICTURES.

It is not part of the default run, because it needs a browser: HEADRACE_BROWSER or `chromium`.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.server.request_record import PARTS
from tests.server.browser import Browser
from tests.server.running import Running, running, until

PROGRAM = (
    os.environ.get("HEADRACE_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
)
LAST = "[...document.querySelectorAll('.assistant')].at(-1)"
FULL_LENGTH_FETCH = """(address, options) => sent(address, !options?.body ? options
    : { ...options, body: JSON.stringify({ ...JSON.parse(options.body), ignore_eos: true, temperature: 0 }) })"""
"""A fetch() that makes responses reach max_tokens."""
SIZES = {"wide": (1280, 800), "phone": (360, 740)}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = os.environ.get("HEADRACE_PICTURES")
    path = Path(folder) if folder else tmp_path_factory.mktemp("pictures")
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM, "there is no Chromium: install one, or name it in HEADRACE_BROWSER"
    browser = Browser(PROGRAM, tmp_path_factory.mktemp("profile"))
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture
def page(browser: Browser, server: Running) -> Iterator[Browser]:
    browser.complaints.clear()
    browser.look(1280, 800, "light")
    browser.open(f"http://127.0.0.1:{server.port}/")
    browser.until("document.querySelector('#state').dataset.state === 'ready'")
    browser.run(f"window.sent = window.fetch; window.fetch = {FULL_LENGTH_FETCH}; 0")
    yield browser
    assert browser.complaints == []


def ask(page: Browser, text: str, max_tokens: int = 20) -> None:
    page.run(f"document.querySelector('#settings [name=max_tokens]').value = {max_tokens}")
    page.run("document.querySelector('#question').focus()")
    page.write(text)
    page.press("Enter")


def wait_for_responses(page: Browser, count: int) -> None:
    page.until(
        f"document.querySelectorAll('.assistant').length === {count} && "
        f"{LAST}.getAttribute('aria-busy') === 'false'"
    )


class TestChat:
    def test_chat_shows_responses(self, page: Browser) -> None:
        ask(page, "Hello there")
        wait_for_responses(page, 1)
        assert page.run("document.querySelector('.user').textContent") == "Hello there"
        assert page.run(f"{LAST}.querySelector('.text').textContent") != ""
        meta = page.run(f"{LAST}.querySelector('.meta').textContent")
        assert (
            "tokens/s" in meta
            and "first token after" in meta
            and "20 tokens" in meta
            and "stopped at max tokens" in meta
        )
        assert page.run("document.querySelector('#question').value") == ""
        ask(page, "And again")
        wait_for_responses(page, 2)
        page.run("document.querySelector('#new-chat').click()")
        assert page.run("document.querySelectorAll('.message').length") == 0

    def test_shift_enter_starts_a_line(self, page: Browser) -> None:
        page.run("document.querySelector('#question').focus()")
        page.write("one")
        page.press("Enter", modifiers=8)
        page.write("two")
        assert page.run("document.querySelector('#question').value") == "one\ntwo"
        assert page.run("document.querySelectorAll('.message').length") == 0

    def test_stop_button_aborts(self, page: Browser, server: Running) -> None:
        page.run(  # as soon as there is text, because the model is fast
            "new MutationObserver((_, watch) => { const send = document.querySelector('#send');"
            f" if ({LAST}?.querySelector('.text').textContent && send.textContent === "
            f"'Stop') {{ watch.disconnect(); send.click(); }} }})"
            ".observe(document.querySelector('#log'), { subtree: true, childList: true })"
        )
        ask(page, "Hello", 1500)
        wait_for_responses(page, 1)
        assert page.run(f"{LAST}.querySelector('.meta').textContent").endswith("stopped")
        assert page.run("document.querySelector('#send').textContent") == "Send"
        until(server.at_rest)

    def test_error_messages_are_shown(self, page: Browser, server: Running) -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 10**6}
        error = server.post("/v1/chat/completions", body).json["error"]
        ask(page, "Hello", 10**6)
        wait_for_responses(page, 1)
        assert (
            page.run(f"{LAST}.querySelector('.error').innerText").split("\n")[0] == error["message"]
        )
        assert error["code"] in page.run(f"{LAST}.querySelector('.error .meta').textContent")
        page.run("document.querySelector('#settings [name=max_tokens]').value = 5")
        page.run(f"{LAST}.querySelector('.error button').click()")
        wait_for_responses(page, 1)
        assert (
            page.run("document.querySelector('.error')") is None
            and page.run(f"{LAST}.querySelector('.text').textContent") != ""
        )
        page.complaints[:] = [
            item for item in page.complaints if "400" not in item
        ]  # the browser logs the failed response

    def test_stream_in_any_chunks(self, page: Browser) -> None:
        deltas = [
            {"reasoning": "Let me\n\nthink"},
            {"reasoning": "."},
            {"content": "It is **wet**, ä"},
        ]
        chunks = [
            {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
        ]
        stream = "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks)
        stream += (
            ': ping\n\ndata: {"error": {"message": "it broke", "code": '
            '"engine_dead"}}\n\ndata: [DONE]\n\n'
        )
        for size in (1, 7, 10_000):
            page.run(
                "window.fetch = async () => "
                f"{{ const all = new TextEncoder().encode({json.dumps(stream)}); let at = 0;"
                " return new Response(new ReadableStream({ pull(out) { if (at >= "
                "all.length) return out.close();"
                f" out.enqueue(all.slice(at, at += {size})); }} }})); }}; 0"
            )
            page.run("document.querySelector('#new-chat').click()")
            ask(page, "Why?")
            wait_for_responses(page, 1)
            assert page.run(f"{LAST}.querySelector('.reasoning').open") is False
            assert (
                page.run(f"{LAST}.querySelector('.thought').innerHTML")
                == "<p>Let me</p><p>think.</p>"
            )
            assert (
                page.run(f"{LAST}.querySelector('.text').innerHTML")
                == "<p>It is <strong>wet</strong>, ä</p>"
            )
            assert (
                page.run(f"{LAST}.querySelector('.error').textContent")
                == "it brokeengine_deadTry again"
            )

    def test_keyboard_navigation(self, page: Browser) -> None:
        reached = []
        for _ in range(6):
            page.press("Tab")
            reached.append(page.run("document.activeElement.id"))
        assert reached[:5] == ["settings-toggle", "new-chat", "log", "question", "send"]


MARKDOWN = {
    "a <img src=x onerror=alert(1)> b": "<p>a &lt;img src=x onerror=alert(1)&gt; b</p>",
    "**bold** and *it* and `a*b*`": "<p><strong>bold</strong> and <em>it</em> and <code>a*b*</code></p>",
    "2 * 3 * 4 and a ** b": "<p>2 * 3 * 4 and a ** b</p>",
    "snake_case_name __init__ x": "<p>snake_case_name <strong>init</strong> x</p>",
    "one\n\ntwo": "<p>one</p><p>two</p>",
    "# Head\ntext": "<h4>Head</h4><p>text</p>",
    "- a\n- b\n  - c\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "- a\n\n- b\n\nend": "<ul><li>a</li><li>b</li></ul><p>end</p>",
    "```py\nif a < b:\n\n    **x**\n```\nend": (
        '<pre data-language="py" tabindex="0"><code>if a &lt; b:\n\n    '
        "**x**</code></pre><p>end</p>"
    ),
    "```\nopen": '<pre tabindex="0"><code>open</code></pre>',
    "> said\n> so": "<blockquote>said\nso</blockquote>",
    "": "",
}


@pytest.mark.parametrize("text", MARKDOWN)
def test_markdown(page: Browser, text: str) -> None:
    """Markdown is the same after it has grown one character at a time."""
    script = """(async () => {{
        const {{ Markdown }} = await import("/page/markdown.js");
        const [whole, grown] = [document.createElement("div"), document.createElement("div")];
        const [once, often] = [new Markdown(whole), new Markdown(grown)];
        once.show({0});
        for (let i = 0; i <= {0}.length; i += 1) often.show({0}.slice(0, i));
        return [whole.innerHTML, grown.innerHTML];
    }})()"""
    assert page.run(script.format(repr(text))) == [MARKDOWN[text]] * 2


class TestEngine:
    def test_dashboard_figures(self, page: Browser, server: Running) -> None:
        ask(page, "Hello there, " * 60, 200)
        wait_for_responses(page, 1)
        page.until(
            "Number(document.querySelector('#total-output-tokens').textContent.replace(',', "
            "'')) >= 200"
        )
        assert page.run("document.querySelectorAll('.plots canvas').length") == 6
        page.until(
            "document.querySelector('#blocks-note').textContent.includes('cached for prefixes')"
        )
        assert page.run("document.querySelector('#blocks-value').textContent").endswith("of 64")
        assert (
            server.port and page.run("document.querySelector('#roofline-note').textContent") != ""
        )
        # Each bar ends with its last part.
        page.until(
            "[...document.querySelectorAll('.stack')].every((bar) => "
            "getComputedStyle(bar).backgroundImage.match(/ (100|99\\.9[0-9]*)%\\)$/))"
        )
        (request,) = page.run(
            "[...document.querySelectorAll('.panel')].map((one) => one.textContent)"
            ".filter((text) => text.startsWith('Mean time'))"
        )
        assert all(part in request for part in PARTS)

    def test_server_that_ended_is_shown(self, browser: Browser, model: str) -> None:
        for own in running(model, "--threads", "1", "--kv-blocks", "16"):
            browser.open(f"http://127.0.0.1:{own.port}/")
            browser.until("document.querySelector('#state').dataset.state === 'ready'")
            own.stop()
            browser.until("document.querySelector('#state').dataset.state === 'away'")
            ask(browser, "Hello")
            wait_for_responses(browser, 1)
            assert "cannot be reached" in browser.run(f"{LAST}.querySelector('.error').textContent")

    def test_api_key_in_the_address(self, browser: Browser, model: str) -> None:
        """The browser sends the password of the page's address with all requests of the page."""
        for own in running(model, "--threads", "1", "--kv-blocks", "16", "--api-key", "secret"):
            browser.complaints.clear()
            browser.open(f"http://me:secret@127.0.0.1:{own.port}/")
            browser.until("document.querySelector('#state').dataset.state === 'ready'")
            ask(browser, "Hello")
            wait_for_responses(browser, 1)
            assert (
                browser.run("document.querySelector('.error')?.textContent ?? ''") == ""
                and browser.complaints == []
            )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_layout_in_sizes_and_schemes(page: Browser, pictures: Path, size: str, scheme: str) -> None:
    """The page fits the screen, only the conversation moves, and screenshots are saved."""
    page.look(*SIZES[size], scheme)
    page.until(
        f"innerWidth === {SIZES[size][0]} && new Promise((drawn) => setTimeout(() => "
        "drawn(true), 500))"
    )
    page.run(
        "window.shifts = []; new PerformanceObserver((list) => "
        "list.getEntries().forEach((one) => one.sources.forEach(({ node }) => {"
        " const inside = document.querySelector('#log').contains(node);"
        " if (node?.nodeType === 1 && !inside) shifts.push(node.id || node.className);"
        " }))).observe({ type: 'layout-shift', buffered: false }); 0"
    )
    ask(page, "Hello")
    wait_for_responses(page, 1)
    for part in ("chat", "engine"):
        if size == "phone":
            page.run(f"document.querySelector('[data-show={part}]').click()")
        page.until("new Promise((resolve) => setTimeout(() => resolve(true), 1200))")
        assert page.run("document.documentElement.scrollWidth") == SIZES[size][0]
        assert page.run(
            "[...document.querySelectorAll('.panel')].every((one) => one.scrollWidth <= "
            "one.clientWidth)"
        )
        assert page.run(
            "[...document.querySelectorAll('output')].every((one) => one.scrollWidth <= "
            "one.clientWidth)"
        )
        if part == "engine" or size == "wide":
            page.picture(pictures / f"{size}-{scheme}.png")
    assert page.run("shifts") == []
