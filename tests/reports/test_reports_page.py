"""The report in a browser: errors, keyboard, phone, paper, dark."""

import shutil

import pytest
from reports_models import PROVENANCE, bench_run, card, demo_run, policy

from turbomill.reports.render import write_report
from turbomill.reports.runs import ByLength, LayerResult, Run

CHROMIUM = next(
    (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None
)
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
PHONE = {"width": 390, "height": 844}


def kv_run():
    rows = []
    for bits, drop in ((16, 0.0), (8, 0.01), (4, 0.4)):
        lengths = [
            ByLength(tokens=n, ppl=12 + drop, kl=drop / 10 * n / 256, passkey=1 - drop, copied=0.9 - drop)
            for n in (256, 512, 1024)
        ]
        rows.append(policy(bits, 12 + drop, drop / 10).model_copy(update={"by_length": lengths}))
    name = "a-model-with-a-name-that-does-not-break/" + "x" * 60
    return Run(kind="kv", model=card(name), policies=rows, verdict="test first", provenance=PROVENANCE)


def serve_run():
    loads = [
        {
            **{
                "model_id": "smol",
                "request_rate": rate,
                "max_concurrency": None,
                "completed": 9,
                "failed": 0,
            },
            **{"duration": 3.0, "output_throughput": 30.0, "errors": []},
            **{f"{k}_{m}_ms": 50.0 * rate for k in ("median", "p99") for m in ("ttft", "tpot", "e2el")},
        }
        for rate in (1.0, 2.0, 3.0)
    ]
    knee = {"request_rate": 2.0, "share": 0.99, "goodput": {"ttft": 100.0}}
    return Run(kind="bench_serve", serve=loads, knee=knee, provenance=PROVENANCE)


def quant_run():
    rows = [
        LayerResult(
            layer=layer,
            linear=linear,
            method="awq",
            weight_error=0.01,
            rtn_loss=0.004 * (layer + 1),
            loss=0.002 * (layer + 1),
            fallback=False,
            seconds=0.1,
            scheme="w4g64asym",
            tokens=100,
        )
        for layer in range(4)
        for linear in ("self_attn.q_proj", "mlp.down_proj")
    ]
    return Run(kind="quantize", layers=rows, provenance={**PROVENANCE, "method": "awq", "seconds": 3.0})


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    runs = [demo_run(), kv_run(), bench_run(), serve_run(), quant_run()]
    html, _, _ = write_report(runs, folder / "report.html")
    return html


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, report):
    """Opens the report; afterwards nothing may have gone wrong, and nothing may have been asked for."""
    contexts, problems, requests = [], [], []

    def opened(**options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(report.as_uri())
        page.wait_for_selector("#size-quality .main-svg")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []
    outside = [url for url in requests if url != report.as_uri() and not url.startswith(("data:", "blob:"))]
    assert requests and outside == []


def drawn(page, plot):
    """Names of the traces that are drawn, and the title of the y axis."""
    names = page.evaluate(f"document.getElementById('{plot}').data.map(trace => trace.name)")
    return names, page.evaluate(f"document.getElementById('{plot}').layout.yaxis.title.text")


PLOTS = ["size-quality", "quality-speed", "kv-length-1", "rate-latency-3", "layer-loss-4"]


def test_every_plot_is_drawn_with_its_controls(open_page):
    page = open_page(viewport={"width": 1200, "height": 900})
    assert page.eval_on_selector_all(".plot", "all => all.map(plot => plot.id)") == PLOTS
    for plot in PLOTS:
        names, _ = drawn(page, plot)
        buttons = page.eval_on_selector_all(
            f"[data-controls={plot}] button", "all => all.map(button => button.textContent)"
        )
        assert buttons == names and len(set(names)) == len(names)
        assert page.locator(f"#{plot} .main-svg").first.is_visible()


def test_series_are_hidden_and_shown_by_mouse_and_keyboard(open_page):
    page = open_page()
    button = page.get_by_role("button", name="KV 8").first
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert drawn(page, "quality-speed")[0] == ["KV 16", "KV 4", "Pareto front"]
    button.click()
    assert "KV 8" in drawn(page, "quality-speed")[0] and button.get_attribute("aria-pressed") == "true"
    # The same without a mouse: from the button before, Tab and Space.
    page.get_by_role("button", name="KV 16").first.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert "KV 8" not in drawn(page, "quality-speed")[0]
    page.keyboard.press("Enter")
    assert "KV 8" in drawn(page, "quality-speed")[0]


def test_views_are_chosen_by_mouse_and_keyboard(open_page):
    page = open_page()
    assert drawn(page, "kv-length-1") == (["KV 16", "KV 8", "KV 4"], "KL to the unquantized cache")
    page.get_by_role("radio", name="Passkey").check()
    assert drawn(page, "kv-length-1")[1] == "passkeys found (share)"
    page.keyboard.press("ArrowRight")
    assert drawn(page, "kv-length-1")[1] == "lines copied exactly (share)"
    page.get_by_role("radio", name="TPOT").check()
    assert drawn(page, "rate-latency-3") == (["median", "p99", "knee"], "time per output token (ms)")
    # A series that is hidden stays hidden in another view.
    page.locator("[data-controls=rate-latency-3]").get_by_role("button", name="p99").click()
    page.get_by_role("radio", name="E2EL").check()
    assert drawn(page, "rate-latency-3")[0] == ["median", "knee"]


def test_the_keyboard_reaches_everything_from_the_top(open_page):
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the summary"
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.tagName + (document.activeElement.className || '')")
        )
    assert {"BUTTON", "INPUT", "DIVscroll", "SUMMARY"} <= reached


def test_a_phone_scrolls_tables_not_the_page(open_page, tmp_path):
    page = open_page(viewport=PHONE, device_scale_factor=2, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    wide = page.evaluate(
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, .plot, caption, script')"
        f" && e.getBoundingClientRect().right > {PHONE['width']} + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    assert page.evaluate("document.querySelector('.scroll').scrollWidth") > PHONE["width"]
    small = page.eval_on_selector_all("button", "all => all.filter(b => b.offsetHeight < 24).length")
    assert small == 0
    shot = tmp_path / "phone.png"
    page.screenshot(path=str(shot), full_page=True)
    assert shot.stat().st_size > 50_000


def test_a_screen_reader_is_told_everything(open_page):
    page = open_page()
    tree = page.locator("body").aria_snapshot()
    assert 'heading "Turbomill report" [level=1]' in tree and 'heading "Summary" [level=2]' in tree
    for plot in PLOTS:
        label = page.locator(f"#{plot}").get_attribute("aria-label")
        assert f'img "{label[:20]}' in tree.replace("'", "") and len(label) > 80, plot
    assert page.locator("table").count() == page.get_by_role("table").count()
    unnamed = page.eval_on_selector_all(
        "table", "all => all.filter(t => !t.caption.textContent.trim()).length"
    )
    assert unnamed == 0
    assert page.get_by_role("group", name="Series").count() == len(PLOTS)
    assert page.get_by_role("radio").count() == 4 + 3 + 3
    for region in page.locator("[role=region]").all():
        assert region.get_attribute("aria-label") and region.get_attribute("tabindex") == "0"


def contrast(page, selector, ground="body"):
    """WCAG's ratio of an element's colour and the page's ground."""

    def luminance(text):
        rgb = [int(part) / 255 for part in text[text.index("(") + 1 : -1].split(",")[:3]]
        r, g, b = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    style = "getComputedStyle(document.querySelector('{}'))"
    ink = luminance(page.evaluate(style.format(selector) + ".color"))
    paper = luminance(page.evaluate(style.format(ground) + ".backgroundColor"))
    return (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_can_be_read(open_page, scheme):
    page = open_page(color_scheme=scheme)
    for selector in ("h1", ".note", "td", "figcaption", "button", ".verdict"):
        assert contrast(page, selector) >= 4.5, selector
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert dark == (scheme == "dark")
    text = page.evaluate("getComputedStyle(document.querySelector('#size-quality .xtitle')).fill")
    assert text == ("rgb(231, 233, 230)" if scheme == "dark" else "rgb(28, 31, 35)")
    # Turned while it is open, the plots turn too.
    page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    page.wait_for_function(
        f"getComputedStyle(document.querySelector('#size-quality .xtitle')).fill !== '{text}'", timeout=5000
    )


def test_paper_is_white_and_folds_nothing_away(open_page, tmp_path):
    page = open_page(color_scheme="dark")
    assert page.locator("details:not([open])").count() > 0
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(28, 31, 35)"
    fill = page.evaluate("getComputedStyle(document.querySelector('#size-quality .xtitle')).fill")
    assert fill == "rgb(28, 31, 35)"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() > 0
    file = tmp_path / "report.pdf"
    page.pdf(path=str(file))
    assert file.read_bytes().startswith(b"%PDF") and file.stat().st_size > 50_000
