"""The page in a real browser, headless Chromium; skipped where there is none:

1. no message on the console, no request but for the page itself, also with hostile text in every place
2. the pictures are there: curves, the plan's rows, fillers and labels, the segments with their trained text
3. buttons, arrow keys, the number field and the address change the step; what is drawn is the stored plan
4. charts and rows can be read by pointer and by keyboard; pressing a group shows it alone
5. in dark mode text and ground differ enough; at 360 pixels nothing but tables and plans scrolls sideways
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evenstep.report.html_page import write_report
from report_runs import HOSTILE, append_lines, metrics_of, page_data, rollout_of, small_run

pytestmark = pytest.mark.browser

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="selenium is not installed: it comes with evenstep[dev]"
    )
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed: apt-get install chromium chromium-driver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_run(tmp_path_factory.mktemp("runs") / "run")
    append_lines(folder / "metrics.jsonl", [metrics_of(3, stepped=False, skip_reason="all advantages are 0")])
    return write_report(folder)[0]


def opened(browser: Any, path: Path, address: str = "", *, width: int = 1200, scheme: str = "light") -> Any:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get("about:blank")  # else another address of the same page would not load it again
    browser.get(path.as_uri() + address)
    assert browser.get_log("browser") == []
    return browser


def count(browser: Any, selector: str) -> int:
    return len(browser.find_elements("css selector", selector))


def text(browser: Any, selector: str) -> str:
    return browser.find_element("css selector", selector).get_property("textContent")


def press(browser: Any, selector: str, key: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.execute_script("document.querySelector(arguments[0]).focus()", selector)
    browser.switch_to.active_element.send_keys(getattr(Keys, key))


def click(browser: Any, selector: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
    browser.find_element("css selector", selector).click()


def until(browser: Any, is_so: Callable[[], bool]) -> None:
    """Wait for what the page does after an event of its own."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 10).until(lambda _: is_so())


def drawn_window(browser: Any) -> int:
    label = browser.find_element("id", "plan-picture").get_attribute("aria-label")
    return int(label.partition("window ")[2].partition(":")[0])


def test_the_pictures_are_there(browser: Any, page: Path) -> None:
    opened(browser, page)
    assert count(browser, "#charts figure svg") >= 12
    assert count(browser, '#charts [data-title="Reward of a rollout"] .band') == 1
    assert count(browser, '#charts [data-title="Loss"] .skipmark') == 1
    assert count(browser, "#plan-picture .row") == 13
    assert count(browser, "#plan rect.filler[fill]") == 3 + 1  # and one in the legend
    labels = {
        element.get_property("textContent") for element in browser.find_elements("css selector", "#plan .rowlabel")
    }
    assert labels >= {"g0·r0·s0", "g1·r1·s4", "g2·r1·s0"}
    assert count(browser, "#rollout .segment") == 5
    assert count(browser, "#rollout mark.trained") == 5
    requests = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [request for request in requests if not request.startswith("data:")] == []


def test_what_is_drawn_is_the_stored_plan(browser: Any, page: Path) -> None:
    opened(browser, page, "#plan=0")
    plan = page_data(page.read_text(encoding="utf-8"))["plans"][0]
    places = browser.execute_script(
        "return [...document.querySelectorAll('#plan .row[data-row]')].map((row) =>"
        " [Number(row.dataset.row), row.x.baseVal.value, row.y.baseVal.value, row.width.baseVal.value])"
    )
    lanes = sorted({y for _, _, y, _ in places})
    assert len(lanes) == plan["numRanks"]
    token = places[0][3] / plan["n"][places[0][0]]
    columns = sorted({x for _, x, _, _ in places})
    for row, x, y, width in places:
        rank, k = lanes.index(y), columns.index(x)
        assert plan["cells"][rank][k] == [row]
        assert width == pytest.approx(plan["n"][row] * token, rel=1e-3)


def test_steps_change(browser: Any, page: Path) -> None:
    opened(browser, page)
    assert drawn_window(browser) == 2  # the newest
    click(browser, "#plan-previous")
    assert drawn_window(browser) == 1
    assert browser.current_url.endswith("#plan=1")
    press(browser, "#plan-picture", "ARROW_LEFT")
    assert drawn_window(browser) == 0
    assert browser.switch_to.active_element.get_attribute("id") == "plan-picture"
    assert not browser.find_element("id", "plan-previous").is_enabled()
    press(browser, "#plan-picture", "ARROW_LEFT")
    assert drawn_window(browser) == 0
    press(browser, "#plan-picture", "END")
    assert drawn_window(browser) == 2
    number = browser.find_element("id", "plan-window")
    number.clear()
    number.send_keys("1\t")
    assert drawn_window(browser) == 1
    number.clear()
    number.send_keys("77\t")
    assert drawn_window(browser) == 2
    assert "window 77 is not in this page" in text(browser, "#plan-said")
    opened(browser, page, "#plan=1")
    assert drawn_window(browser) == 1
    browser.execute_script("location.hash = '#plan=0'")
    until(browser, lambda: drawn_window(browser) == 0)
    assert browser.get_log("browser") == []


def test_rollouts_change(browser: Any, page: Path) -> None:
    opened(browser, page)
    data = page_data(page.read_text(encoding="utf-8"))["rollouts"]
    click(browser, "#rollout-next")
    assert count(browser, "#rollout .segment") == data[1]["numSegments"]
    at = next(i for i, rollout in enumerate(data) if rollout["id"] == "c2/p1/g1")
    opened(browser, page, "#rollout=c2%2Fp1%2Fg1")
    assert browser.find_element("id", "rollout-select").get_property("value") == str(at)
    shown = text(browser, "#rollout .segment pre")
    assert shown == "".join(run[1] for run in data[at]["segments"][0]["runs"])
    assert text(browser, "#rollout mark") == data[at]["segments"][0]["runs"][1][1]


def test_values_can_be_read(browser: Any, page: Path) -> None:
    opened(browser, page)
    chart = '#charts [data-title="Trained tokens, N"]'
    press(browser, f"{chart} svg[tabindex]", "HOME")
    assert text(browser, f"{chart} .readout") == "window 0: Trained tokens, N 100"
    press(browser, f"{chart} svg[tabindex]", "ARROW_RIGHT")
    assert text(browser, f"{chart} .readout") == "window 1: Trained tokens, N 101"
    assert drawn_window(browser) == 2  # arrow keys of a chart leave the plan alone
    from selenium.webdriver import ActionChains

    image = browser.find_element("css selector", f"{chart} svg[tabindex]")
    ActionChains(browser).move_to_element_with_offset(image, image.size["width"] // 2 - 15, 0).perform()
    assert text(browser, f"{chart} .readout") == "window 3: Trained tokens, N 103"
    click(browser, '#plan .row[data-row="0"]')
    found = text(browser, "#plan-detail")
    assert found == "g0·r0·s0: 6 tokens, 2 trained; rollout c2/p0/g0 Show its segments."
    click(browser, "#plan-detail a")
    until(browser, lambda: "c2/p0/g0" in text(browser, "#rollout-select option:checked"))
    click(browser, "#plan .legend button:nth-child(2)")
    assert count(browser, "#plan .row[data-row]:not(.dimmed)") == 7
    click(browser, "#plan details summary")
    until(browser, lambda: count(browser, "#plan tbody tr") == 16)
    click(browser, "#window-table summary")
    until(browser, lambda: count(browser, "#window-table td") > 0)
    cells = [cell.get_property("textContent") for cell in browser.find_elements("css selector", "#window-table td")]
    assert "485289984" in cells
    assert browser.get_log("browser") == []


CONTRAST = """
const light = (css) => {
  const [r, g, b] = css.match(/[\\d.]+/g).map((value) => {
    const c = value / 255;
    return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  const colour = getComputedStyle(element).backgroundColor;
  return colour === "rgba(0, 0, 0, 0)" ? ground(element.parentElement) : colour;
};
return [...document.querySelectorAll("p, h1, h2, h3, dt, dd, a, button, pre span, mark, th, figcaption span")]
  .filter((element) => element.textContent.trim() && element.offsetParent && !element.disabled)
  .map((element) => {
    const [a, b] = [light(getComputedStyle(element).color), light(ground(element))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), element.tagName + ": " + element.textContent.slice(0, 60)];
  });
"""


@pytest.mark.parametrize("scheme, is_dark", [("light", False), ("dark", True)])
def test_colours(browser: Any, page: Path, scheme: str, is_dark: bool) -> None:
    opened(browser, page, scheme=scheme)
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (not is_dark)
    found = browser.execute_script(CONTRAST)
    assert len(found) > 60
    assert [item for item in found if item[0] < 4.5] == []


@pytest.mark.parametrize("width", [360, 768, 1200])
def test_nothing_scrolls_sideways(browser: Any, page: Path, width: int) -> None:
    opened(browser, page, width=width)
    for selector in ("#window-table summary", "#plan details summary"):
        click(browser, selector)
    until(browser, lambda: count(browser, "#plan tbody tr") > 0 and count(browser, "#window-table td") > 0)
    root = browser.execute_script(
        "const e = document.documentElement; return [e.scrollWidth, e.clientWidth, innerWidth]"
    )
    assert root[0] <= root[1]
    assert root[2] == width
    outside = browser.execute_script(
        "return [...document.querySelectorAll('body *')].filter((e) => !e.closest('.wide') && !e.closest('.skip') &&"
        " e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert outside == []


def test_hostile_text_runs_nothing(browser: Any, tmp_path: Path) -> None:
    rollouts = [
        rollout_of(0, g, n, 2, status="truncated", status_reason=HOSTILE, prompt_id=HOSTILE, info={HOSTILE: 1})
        for g in range(3)
        for n in range(2)
    ]
    folder = small_run(tmp_path / "run", rollouts=rollouts)
    append_lines(folder / "metrics.jsonl", [metrics_of(3, stepped=False, skip_reason=HOSTILE)])
    (folder / "replay").mkdir()
    (folder / "replay" / "first.json").write_text(json.dumps({"arms": {HOSTILE: {HOSTILE: HOSTILE}}}))
    opened(browser, write_report(folder)[0])
    assert browser.title == "run: evenstep report"
    assert count(browser, "script") == 2
    assert count(browser, "img") == 0
    assert "</script><script>" in text(browser, "#rollout")
    assert "</script><script>" in text(browser, "#replay")
