"""Reports in a real browser: they are drawn, and nothing is asked of a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from mmod.report.page import write_report
from tests.kit.records import write_audit, write_run, write_study

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
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
        yield driver
        # What went wrong anywhere on the page, and what left it.
        assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
        assert asked(driver) <= {address, "data:"}
    finally:
        driver.quit()


def asked(driver: Any) -> set[str]:
    """Return the addresses that were asked for; of data that the page holds "data:" alone."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]
    return {"data:" if url.startswith("data:") else url for url in urls}


def test_every_figure_is_drawn_and_says_what_it_shows(browser: Any) -> None:
    figures = browser.find_elements("css selector", "figure:has(> .chart)")
    assert len(figures) == 1 + 2 + 5 + 5
    for figure in figures:
        drawn = figure.find_element("css selector", "svg")
        assert drawn.rect["width"] > 100
        assert len(drawn.get_attribute("aria-label")) > 40


def test_a_phone_scrolls_one_way_and_dark_is_dark(browser: Any) -> None:
    size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.refresh()
    assert browser.execute_script("return document.scrollingElement.scrollWidth") <= 360
    # Wide figures scroll within the page instead of shrinking until their labels cannot be read.
    shares = "return [...document.querySelectorAll('.chart svg')].map(svg => svg.clientWidth / svg.width.baseVal.value)"
    assert min(browser.execute_script(shares)) > 0.7
    paper = "return getComputedStyle(document.body).backgroundColor"
    ink = "return getComputedStyle(document.querySelector('figure text')).fill"
    light = browser.execute_script(paper), browser.execute_script(ink)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    dark = browser.execute_script(paper), browser.execute_script(ink)
    assert light[0] == "rgb(255, 255, 255)"
    assert light[0] != dark[0]
    assert light[1] != dark[1]
