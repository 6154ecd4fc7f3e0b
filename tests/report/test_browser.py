"""Reports in a real browser: they are drawn, the slider works, and nothing is asked of a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from mmod.report import write_report
from tests.report.records import write_audit, write_run, write_study

pytest.importorskip("vl_convert", reason="needs vl-convert-python, of the extra train")
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
pytestmark = pytest.mark.skipif(not (DRIVER and BROWSER), reason="needs chromium and chromedriver")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("found")
    write_audit(root / "norm", "norm", capacity=(0.5, 0.25))
    write_run(write_audit(root / "random", "random"))
    write_run(root / "run", steps=5)
    write_study(root / "study")
    return write_report([root], root / "report").as_uri()


@pytest.fixture
def browser(address: str) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.set_window_size(1000, 900)
        driver.get(address)
        wait(driver, "return document.documentElement.dataset.drawn !== undefined")
        yield driver
        # What went wrong anywhere on the page, and what left it.
        assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
        assert asked(driver) <= {address, "data:"}
    finally:
        driver.quit()


def wait(driver: Any, condition: str) -> None:
    WebDriverWait(driver, 60).until(lambda driver: driver.execute_script(condition))


def shown(driver: Any, selector: str) -> Any:
    """Return a figure once it was scrolled to and drawn."""
    figure = driver.find_element("css selector", selector)
    driver.execute_script("arguments[0].scrollIntoView({behavior: 'instant'})", figure)
    WebDriverWait(driver, 60).until(lambda driver: figure.get_attribute("data-drawn"))
    return figure


def asked(driver: Any) -> set[str]:
    """Return the addresses that were asked for; of data that the page holds "data:" alone."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [own["params"]["request"]["url"] for own in messages if own["method"] == "Network.requestWillBeSent"]
    return {"data:" if url.startswith("data:") else url for url in urls}


def test_every_figure_is_drawn_and_says_what_it_shows(browser: Any) -> None:
    figures = browser.find_elements("css selector", "figure:has(> .chart)")
    assert len(figures) == 3 + 1 + 1 + 6 + 5
    for figure in figures:
        shown(browser, f"#{figure.get_attribute('id')}")
        drawn = figure.find_element("css selector", "svg")
        assert drawn.rect["width"] > 100
        described = figure.find_elements("css selector", ".chart [aria-label], .chart[aria-label]")
        assert max(len(own.get_attribute("aria-label")) for own in described) > 40


def test_figures_far_below_are_drawn_when_they_come_near(browser: Any) -> None:
    drawn = "return [...document.querySelectorAll('figure:has(> .chart)')].map(figure => 'drawn' in figure.dataset)"
    first = browser.execute_script(drawn)
    assert first[0]
    assert not first[-1]
    browser.execute_script("scrollTo(0, document.body.scrollHeight)")
    wait(browser, f"{drawn}.at(-1)")
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    wait(browser, f"{drawn}.every(Boolean)")


def test_the_slider_and_the_switch_change_the_map_by_keyboard(browser: Any) -> None:
    def marks() -> tuple[int, str]:
        veils = browser.execute_script("return document.querySelectorAll('#maps .mark-rect path').length")
        return veils, browser.execute_script("return document.querySelector('#maps .mark-text text').textContent")

    shown(browser, "#maps")
    first = marks()
    slider = browser.find_element("css selector", "#maps input[type=range]")
    slider.send_keys(Keys.ARROW_RIGHT)
    second = marks()
    # Half of 16 patches are kept at first, a quarter then, prefix token included, of four images.
    assert first[0] < second[0]
    assert [own[1].partition(":")[0] for own in (first, second)] == ["blocks.0", "blocks.1"]
    slider.send_keys(Keys.ARROW_LEFT)
    assert marks() == first
    switch = browser.find_element("css selector", "#maps select")
    switch.send_keys(Keys.ARROW_DOWN)
    wait(browser, f"return document.querySelectorAll('#maps .mark-rect path').length != {first[0]}")
    for control in (slider, switch):
        assert browser.execute_script("return arguments[0].labels.length || arguments[0].ariaLabel", control)


def test_lists_choose_the_run_and_the_figure_of_routers(browser: Any) -> None:
    def points() -> list[str]:
        marks = browser.find_elements("css selector", "#routers .mark-symbol path[aria-label]")
        return [mark.get_attribute("aria-label") for mark in marks]

    shown(browser, "#routers")
    run, figure = browser.find_elements("css selector", "#routers select")
    # Two blocks at three logged steps and one evaluation; then at five, whose evaluation has a kept share alone.
    first = points()
    assert len(first) == 2 * 3 + 1
    run.send_keys(Keys.ARROW_DOWN)
    wait(browser, "return document.querySelectorAll('#routers .mark-symbol path[aria-label]').length == 11")
    figure.send_keys(Keys.ARROW_DOWN)
    wait(browser, "return document.querySelectorAll('#routers .mark-symbol path[aria-label]').length == 10")
    assert all("blocks." in label for label in points())


def test_a_phone_scrolls_one_way_and_dark_is_dark(browser: Any) -> None:
    size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.refresh()
    wait(browser, "return document.documentElement.dataset.drawn === 'light'")
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    everything = "[...document.querySelectorAll('figure:has(> .chart)')].every(figure => 'drawn' in figure.dataset)"
    wait(browser, f"return {everything}")
    assert browser.execute_script("return document.scrollingElement.scrollWidth") <= 360
    paper = "return getComputedStyle(document.body).backgroundColor"
    ink = "return getComputedStyle(document.querySelector('figure text')).fill"
    light = browser.execute_script(paper), browser.execute_script(ink)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    wait(browser, "return document.documentElement.dataset.drawn === 'dark'")
    dark = browser.execute_script(paper), browser.execute_script(ink)
    assert light[0] == "rgb(255, 255, 255)"
    assert light[0] != dark[0]
    assert light[1] != dark[1]
