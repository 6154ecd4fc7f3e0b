"""Photographs of pages by Chromium, and what every pixel shows, read from the boxes of the document."""

import base64
import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from scripts.pages_and_screens.sources import HEIGHT, Page

CLASSES = ("blank", "text", "link", "table", "picture", "button", "title")
"""What a pixel shows. Of several, the later ones win; text in a table is "table"."""
_BOXES = """
const found = [];
const kind = element => {
  if (element.closest('h1,h2,h3,h4,h5,h6')) return 'title';
  if (element.closest('button,select,textarea,[role=button],.btn')) return 'button';
  const table = element.closest('td,th') && element.closest('table');
  if (table && (table.querySelector('th') || table.border > 0)) return 'table';
  return element.closest('a[href]') ? 'link' : 'text';
};
const add = (element, name, box) => {
  if (box.width < 2 || box.height < 2 || box.bottom < 0 || box.top > innerHeight) return;
  const x = box.left + box.width / 2, y = box.top + box.height / 2;
  const inside = (value, size) => Math.min(Math.max(value, 0), size - 1);
  const top = document.elementFromPoint(inside(x, innerWidth), inside(y, innerHeight));
  if (!top || !(top.contains(element) || element.contains(top))) return;
  found.push([name, box.left, box.top, box.right, box.bottom]);
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode;
  if (!node.data.trim() || !node.parentElement.checkVisibility()) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  for (const box of range.getClientRects()) add(node.parentElement, kind(node.parentElement), box);
}
const others = {picture: 'img,svg,canvas,video,object', button: 'button,input,select,textarea,[role=button],.btn'};
for (const name in others)
  for (const element of document.querySelectorAll(others[name])) add(element, name, element.getBoundingClientRect());
return found;
"""


@contextmanager
def browser() -> Iterator[Any]:
    """Start Chromium without a network, and end it."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_page_load_timeout(30)
    try:
        yield driver
    finally:
        driver.quit()


def photograph(driver: Any, page: Page, path: Path, dark: bool = False, scale: int = 1) -> None:
    """Write a photograph of a window of the page to `path`, and what its pixels show to `labels_of(path)`.

    Args:
        dark: Ask the page for its dark style; Chromium darkens pages that have none.
        scale: Pixels of the photograph along a pixel of the page.
    """
    metrics = {"width": page.width, "height": HEIGHT, "deviceScaleFactor": scale, "mobile": False}
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    driver.execute_cdp_cmd("Emulation.setAutoDarkModeOverride", {"enabled": dark})
    driver.get(page.address)
    driver.execute_script(
        "scrollTo(0, arguments[0] * (document.documentElement.scrollHeight - innerHeight))", page.start
    )
    boxes = [[name, *(scale * end for end in ends)] for name, *ends in driver.execute_script(_BOXES)]
    data = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    picture = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(shown_by(boxes, picture.width, picture.height)).save(labels_of(path))
    # The photograph is written last, so that one that is there is whole.
    picture.save(path)


def shown_by(boxes: list[list[Any]], width: int, height: int) -> np.ndarray:
    """Return the class of every pixel (height, width)."""
    label_HW = np.zeros((height, width), np.uint8)
    for name, left, top, right, bottom in sorted(boxes, key=lambda box: CLASSES.index(box[0])):
        rows = slice(max(0, round(top)), max(0, round(bottom)))
        label_HW[rows, max(0, round(left)) : max(0, round(right))] = CLASSES.index(name)
    return label_HW


def labels_of(path: Path) -> Path:
    """Return where the classes of a picture's pixels are."""
    return path.with_suffix(".labels.png")
