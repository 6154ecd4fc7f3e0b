"""Pages and screens drawn at random, with what every pixel shows: for a study that needs no browser."""

import random
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from scripts.pages_and_screens.browser import CLASSES

FONTS = Path(matplotlib.get_data_path()) / "fonts/ttf"
_TEXT = (
    "the of and router token patch block model image residual depth capacity attention score layer merge select time "
    "budget share update keys values norm table figure result method page screen button menu file edit view window "
    "settings search account price total date name street city"
)
Colour = tuple[int, int, int]


class Canvas:
    """A picture that is drawn, and the class of each of its pixels."""

    def __init__(self, draw: random.Random, width: int, height: int, back: Colour) -> None:
        self.draw = draw
        self.width = width
        self.height = height
        self.fore = (0, 0, 0) if sum(back) > 380 else (235, 235, 235)
        self.picture = Image.new("RGB", (width, height), back)
        self.pen = ImageDraw.Draw(self.picture)
        self.label_HW = np.zeros((height, width), np.uint8)

    def mark(self, name: str, left: int, top: int, right: int, bottom: int) -> None:
        """Set the class of a rectangle."""
        self.label_HW[max(0, top) : max(0, bottom), max(0, left) : max(0, right)] = CLASSES.index(name)

    def words(self, count: int) -> str:
        """Return words drawn at random."""
        return " ".join(self.draw.choices(_TEXT.split(), k=count))

    def write(self, name: str, x: int, y: int, text: str, size: int, width: int, fill: Colour | None = None) -> None:
        """Write as much of a text as fits on a line of this width, titles in bold."""
        font = ImageFont.truetype(str(FONTS / f"DejaVuSans{'-Bold' if name == 'title' else ''}.ttf"), size)
        while text and self.pen.textlength(text, font=font) > width:
            text = text.rpartition(" ")[0]
        if text:
            self.pen.text((x, y), text, font=font, fill=fill or self.fore)
            left, top, right, bottom = self.pen.textbbox((x, y), text, font=font)
            self.mark(name, int(left), int(top), int(right), int(bottom))

    def photo(self, x: int, y: int, width: int, height: int) -> None:
        """Paste a blurred picture with noise."""
        noise = np.random.default_rng(self.draw.randrange(2**30))
        coarse = noise.normal(128, 60, (6, 8, 3)).clip(0, 255).astype(np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), float)
        pixels = (smooth + noise.normal(0, 8, smooth.shape)).clip(0, 255).astype(np.uint8)
        self.picture.paste(Image.fromarray(pixels), (x, y))
        self.mark("picture", x, y, x + width, y + height)

    def table(self, x: int, y: int, width: int, rows: int, columns: int) -> None:
        """Draw a table of numbers, rows of 22 pixels."""
        for row in range(rows + 1):
            self.pen.line((x, y + 22 * row, x + width, y + 22 * row), fill="gray")
        for column in range(columns + 1):
            place = x + column * width // columns
            self.pen.line((place, y, place, y + 22 * rows), fill="gray")
        for cell in range(rows * columns):
            place = (x + cell % columns * width // columns + 4, y + cell // columns * 22 + 4)
            self.write("table", *place, str(self.draw.randint(0, 9999)), 11, width)
        self.mark("table", x, y, x + width, y + 22 * rows)

    def button(self, x: int, y: int) -> None:
        """Draw a button with a word."""
        width = self.draw.randint(80, 140)
        self.pen.rounded_rectangle((x, y, x + width, y + 32), 6, fill=(60, 90, 160))
        self.write("button", x + 12, y + 8, self.words(1).title(), 13, width - 16, (255, 255, 255))
        self.mark("button", x, y, x + width, y + 32)


def page(seed: int, width: int = 476, height: int = 644) -> Canvas:
    """Return a printed page of one or two columns: paragraphs, headings, pictures, tables, space."""
    draw = random.Random(seed)
    canvas = Canvas(draw, width, height, (255, 255, 255))
    size = draw.choice([11, 12, 13])
    columns = draw.choice([1, 1, 2])
    margin = draw.randint(28, 50)
    column_width = (width - 2 * margin - 20 * (columns - 1)) // columns
    for column in range(columns):
        x = margin + column * (column_width + 20)
        y = margin
        while y < height - margin - 30:
            room = height - margin - y
            kind = draw.choice(["title", "text", "text", "text", "picture", "table", "space"])
            if kind == "title":
                canvas.write("title", x, y, canvas.words(4).title(), size + 7, column_width)
                y += size + 20
            elif kind == "text":
                for _ in range(min(draw.randint(3, 8), room // (size + 6))):
                    canvas.write("text", x, y, canvas.words(20), size, column_width)
                    y += size + 6
                y += 14
            elif kind == "picture" and room > 60:
                high = min(draw.randint(70, 160), room)
                canvas.photo(x, y, column_width, high)
                y += high + 14
            elif kind == "table" and room > 140:
                rows = draw.randint(3, 6)
                canvas.table(x, y, column_width, rows, draw.randint(2, 4))
                y += 22 * rows + 14
            else:
                y += draw.randint(20, 80)
    return canvas


def screen(seed: int, width: int = 476, height: int = 644) -> Canvas:
    """Return a screen of a program: a bar, perhaps a list at the left, cards, buttons, pictures, text."""
    draw = random.Random(seed)
    back = draw.choice([(250, 250, 250), (32, 33, 36), (240, 244, 248)])
    canvas = Canvas(draw, width, height, back)
    bar = draw.randint(40, 60)
    canvas.pen.rectangle((0, 0, width, bar), fill=draw.choice([(60, 90, 160), (20, 20, 20), (200, 60, 60)]))
    canvas.write("title", 16, bar // 3, canvas.words(2).title(), 18, width, (255, 255, 255))
    side = draw.choice([0, 110])
    if side:
        canvas.pen.rectangle((0, bar, side, height), fill=tuple(max(0, value - 14) for value in back))
        for line in range(draw.randint(4, 9)):
            canvas.write("link", 12, bar + 20 + 36 * line, canvas.words(1).title(), 13, side - 16)
    x = side + 20
    inner = width - side - 40
    y = bar + 20
    while y < height - 90:
        kind = draw.choice(["card", "button", "picture", "text", "table", "space"])
        if kind == "card":
            high = draw.randint(60, 120)
            canvas.pen.rounded_rectangle((x, y, x + inner, y + high), 8, outline="gray")
            canvas.write("title", x + 12, y + 10, canvas.words(1).title(), 16, inner - 24)
            canvas.write("text", x + 12, y + 34, canvas.words(7), 12, inner - 24)
            y += high + 18
        elif kind == "button":
            canvas.button(x, y)
            y += 50
        elif kind == "picture":
            high = min(draw.randint(70, 150), height - y - 10)
            canvas.photo(x, y, inner, high)
            y += high + 18
        elif kind == "text":
            for _ in range(draw.randint(1, 3)):
                canvas.write("text", x, y, canvas.words(8), 13, inner)
                y += 20
            y += 10
        elif kind == "table" and height - y > 130:
            rows = draw.randint(2, 4)
            canvas.table(x, y, inner, rows, draw.randint(2, 4))
            y += 22 * rows + 18
        else:
            y += draw.randint(30, 100)
    return canvas
