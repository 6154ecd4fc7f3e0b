"""Real pages and screens: files of Debian 12's packages, which are photographed or read, and never shipped."""

import csv
import gzip
import html
import os
import random
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import sklearn
from PIL import Image

WIDTHS = (1024, 1280, 1440)
HEIGHT = 1600
TRAIN, TEST = "train", "test"
_SMALLEST_PAGE = 6000

# Packages: the folders of their pages, and their licences as Debian states them.
PAGES = {
    "anarchism": ("/usr/share/doc/anarchism/html", "GPL-2+"),
    "apache2-doc": ("/usr/share/doc/apache2-doc/manual/en", "Apache-2.0"),
    "asymptote-doc": ("/usr/share/doc/asymptote/html", "LGPL-3+"),
    "cmake-doc": ("/usr/share/doc/cmake-data/html", "BSD-3-Clause"),
    "debian-faq": ("/usr/share/doc/debian/FAQ", "GPL-2+"),
    "debian-handbook": ("/usr/share/doc/debian-handbook/html/en-US", "GPL-2+ or CC-BY-SA-3.0"),
    "debian-reference-en": ("/usr/share/debian-reference", "GPL-2+"),
    "developers-reference": ("/usr/share/developers-reference", "GPL-2+"),
    "doxygen-doc": ("/usr/share/doc/doxygen/html", "GPL-2"),
    "git-doc": ("/usr/share/doc/git-doc", "GPL-2"),
    "gnuplot-doc": ("/usr/share/doc/gnuplot/htmldocs", "gnuplot"),
    "graphviz-doc": ("/usr/share/doc/graphviz/html", "EPL-1.0"),
    "imagemagick-6-doc": ("/usr/share/doc/imagemagick-6-common/html/www", "ImageMagick"),
    "installation-guide-amd64": ("/usr/share/doc/installation-guide-amd64/en", "GPL-2"),
    "kicad-doc-en": ("/usr/share/doc/kicad/help/en", "GPL-3+ or CC-BY-3.0"),
    "libreoffice-help-en-us": ("/usr/share/libreoffice/help/en-US/text", "MPL-2.0"),
    "nodejs-doc": ("/usr/share/doc/nodejs/api", "MIT"),
    "octave-doc": ("/usr/share/doc/octave/octave.html", "GPL-3+"),
    "postgresql-doc-15": ("/usr/share/doc/postgresql-doc-15/html", "PostgreSQL"),
    "python-django-doc": ("/usr/share/doc/python-django-doc/html", "BSD-3-Clause"),
    "python-flask-doc": ("/usr/share/doc/python-flask-doc/html", "BSD-3-Clause"),
    "python-sklearn-doc": ("/usr/share/doc/python-sklearn-doc/html", "BSD-3-Clause"),
    "python3.11-doc": ("/usr/share/doc/python3.11/html", "PSF-2.0"),
    "r-doc-html": ("/usr/share/doc/r-doc-html/manual", "GPL-2"),
    "sqlite3-doc": ("/usr/share/doc/sqlite3", "public domain"),
}
FORMS = "/usr/share/doc/libjs-bootstrap5/examples"
STYLE = "/usr/share/nodejs/bootstrap/dist/css/bootstrap.css"
# Screenshots of desktops and programs that authors of these pages took, and plots of matplotlib.
PICTURES = {
    "screenshot": ["/usr/share/doc/debian-handbook/html/en-US/images", "/usr/share/doc/kicad/help/en/images"],
    "plot": ["/usr/share/doc/python-sklearn-doc/html/_images"],
}
PDFS = {
    "debian-faq": "/usr/share/doc/debian/FAQ/debian-faq.en.pdf.gz",
    "doxygen-doc": "/usr/share/doc/doxygen/doxygen_manual.pdf",
    "gnuplot-doc": "/usr/share/doc/gnuplot/gnuplot.pdf",
    "graphviz-doc": "/usr/share/doc/graphviz/pdf/dotguide.pdf.gz",
    "installation-guide-amd64": "/usr/share/doc/installation-guide-amd64/en/install.en.pdf.gz",
    "octave-doc": "/usr/share/doc/octave/octave.pdf",
}


@dataclass(frozen=True)
class Page:
    """A page to be photographed.

    Args:
        address: What the browser opens.
        width: Of the window in pixels.
        split: "train" or "test".
        start: Where the window begins, as a share of what can be scrolled.
    """

    address: str
    width: int
    split: str
    start: float


def pages(per_package: int = 5, seed: int = 0) -> list[Page]:
    """Return pages of every package; two of five are for training, half begin at the top."""
    draw = random.Random(seed)
    chosen = []
    for folder, _ in PAGES.values():
        files = [file for file in _files(folder, ".html") if file.stat().st_size > _SMALLEST_PAGE]
        for number, file in enumerate(draw.sample(files, min(per_package, len(files)))):
            split = TRAIN if number % 5 in (0, 2) else TEST
            start = draw.choice([0.0, draw.random()])
            chosen.append(Page(f"file://{file}", draw.choice(WIDTHS), split, start))
    return chosen


def _files(folder: str, ending: str) -> list[Path]:
    """Return the files below a folder whose names end so; links to folders are not followed."""
    found = [Path(place) / name for place, _, names in os.walk(folder) for name in names if name.endswith(ending)]
    return sorted(file for file in found if file.is_file())


def forms(folder: Path, seed: int = 0) -> list[Page]:
    """Return forms, dashboards and other user interfaces of Bootstrap's documentation, written to `folder`.

    The package has them as templates, without the style sheet that they are for.
    """
    draw = random.Random(seed)
    written = []
    for file in _files(FORMS, "index.html"):
        if file.parent.name.endswith("-rtl"):
            continue
        _, front, body = file.read_text().split("---\n", 2)
        styles = [STYLE, *(file.parent / name for name in re.findall(r'- "(\S+\.css)"', front))]
        links = "".join(f"<link rel='stylesheet' href='file://{style}'>" for style in styles)
        body = re.sub(r"{{.*?}}", "", body, flags=re.DOTALL)
        written.append(_written(folder, file.parent.name, links + body, draw.choice(WIDTHS)))
    return written


def sheets(folder: Path, seed: int = 0) -> list[Page]:
    """Return tables of numbers that scikit-learn ships, written to `folder` as pages that look like spreadsheets."""
    draw = random.Random(seed)
    style = (
        "body{margin:0;font:13px 'Liberation Sans'} table{border-collapse:collapse} "
        "td,th{border:1px solid #d0d0d0;height:19px;min-width:88px;padding:0 4px;text-align:right} "
        "th{background:#efefef;font-weight:normal;text-align:center}"
    )
    written = []
    for number, file in enumerate(sorted(Path(sklearn.__file__).parent.glob("datasets/data/*.csv"))):
        with file.open(newline="") as lines:
            rows = list(csv.reader(lines))[:90]
        columns = len(rows[1]) + draw.randint(0, 6)
        head = "".join(f"<th>{chr(65 + column % 26)}</th>" for column in range(columns))
        body = ""
        for line, row in enumerate(rows):
            cells = [html.escape(cell[:12]) for cell in row] + [""] * (columns - len(row))
            body += f"<tr><th>{line + 1}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        text = f"<style>{style}</style><table><tr><th></th>{head}</tr>{body}</table>"
        written.append(_written(folder, f"sheet{number}", text, draw.choice(WIDTHS)))
    return written


def terminals(folder: Path, seed: int = 0) -> list[Page]:
    """Return what commands print, written to `folder` as pages that look like terminals."""
    draw = random.Random(seed)
    commands = [
        ["dpkg", "-l"],
        ["ls", "-l", "/usr/bin"],
        ["ls", "/usr/share/doc"],
        ["apt-cache", "show", "python3", "git", "sqlite3"],
        ["python3", "--help"],
        ["git", "help", "-a"],
        ["tree", "-L", "2", "/usr/share/doc/git-doc"],
        ["head", "-n", "200", "/usr/share/common-licenses/Apache-2.0"],
        ["sqlite3", "--help"],
        ["gcc", "--help"],
        ["ffmpeg", "-h"],
        ["find", "/usr/share/doc/cmake-data/html", "-name", "*FLAGS*"],
    ]
    written = []
    for number, command in enumerate(commands):
        try:
            text = subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
        except FileNotFoundError:
            continue
        lines = text.splitlines()[: draw.randint(20, 110)]
        fore, back = draw.choice([("#d3d7cf", "#000"), ("#eee", "#300a24"), ("#222", "#fff"), ("#839496", "#002b36")])
        style = (
            f"body{{margin:4px;background:{back};color:{fore};font:{draw.choice([13, 14, 16])}px 'DejaVu Sans Mono'}}"
        )
        shown = html.escape("\n".join([f"user@debian:~$ {' '.join(command)}", *lines, "user@debian:~$ "]))
        body = f"<style>{style}</style><pre style='margin:0;font:inherit'>{shown}</pre>"
        written.append(_written(folder, f"terminal{number}", body, draw.choice(WIDTHS)))
    return written


def _written(folder: Path, name: str, text: str, width: int) -> Page:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.html"
    path.write_text(f"<!doctype html><meta charset='utf-8'>{text}")
    return Page(path.resolve().as_uri(), width, TEST, 0.0)


def pictures(kind: str, count: int, seed: int = 0) -> list[Path]:
    """Return pictures of a kind that packages hold, of at least 600 x 400 pixels."""
    files = [file for folder in PICTURES[kind] for file in _files(folder, ".png")]
    large = []
    for file in random.Random(seed).sample(files, len(files)):
        with Image.open(file) as picture:
            if picture.width >= 600 and picture.height >= 400:
                large.append(file)
    return large[:count]


def render_pdfs(folder: Path, per_file: int = 5, seed: int = 0) -> None:
    """Write pages of PDF files, drawn by Poppler at 110 pixels an inch, about a window high."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for file in PDFS.values():
        path = folder / Path(file).name.removesuffix(".gz")
        data = Path(file).read_bytes()
        path.write_bytes(gzip.decompress(data) if file.endswith(".gz") else data)
        said = subprocess.run(["pdfinfo", path], capture_output=True, text=True, check=True).stdout
        (count,) = [int(line.split()[1]) for line in said.splitlines() if line.startswith("Pages:")]
        for page in draw.sample(range(1, count + 1), min(per_file, count)):
            target = folder / f"{path.stem}-{page}"
            command = ["pdftoppm", "-r", "110", "-png", "-f", str(page), "-l", str(page), "-singlefile"]
            subprocess.run([*command, path, target], check=True)
        path.unlink()
