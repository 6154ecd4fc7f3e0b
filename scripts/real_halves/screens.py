"""Screens and pages with large type, drawn at random, and questions that their own structure answers.

Screens have a coloured bar with their title, a button, cards and more; pages have a title above text, pictures and
tables. Both have four cells below the title. `things.json` names what every square of 2 x 2 patches shows.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np

from scripts.pages_and_screens.drawn import Canvas, Colour
from scripts.real_halves.model import PATCH
from scripts.real_halves.questions import PICTURES, Question, Thing, conversation, write

PATCHES = 12
"""Patches a side of the pictures."""
SIDE = PATCHES * PATCH
TRAINING_PICTURES = 1200
HELD_OUT = 200
KINDS = ("title", "colour", "count", "table", "where")
_BAR = 4 * PATCH
_WIDTH = SIDE // 2
_HEIGHT = (SIDE - _BAR) // 2
_CORNERS = {"top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1)}
_TITLES = ("Home", "Files", "Music", "Search", "Photos", "Orders", "Report", "Events", "Travel", "Prices")
COLOURS: dict[str, Colour] = {
    "red": (214, 40, 40),
    "green": (40, 150, 60),
    "blue": (40, 90, 220),
    "yellow": (245, 205, 40),
    "purple": (130, 50, 170),
    "orange": (245, 130, 30),
}
_BLANK = "blank"
_SIZES = {
    "button": (66, 34),
    "table": (74, 44),
    "card": (74, 48),
    "picture": (72, 46),
    "text": (74, 44),
    _BLANK: (2, 2),
}
_SCREENS = "screens"
HELD_OUT_PICTURE = "held_out"
"""What the names of pictures begin with that are evaluated."""
_SQUARE = 2
# Most squares show nothing; a few say as much.
_BLANK_SQUARES = 6
_PER_PICTURE = 2
_ASKED = 4
Box = tuple[int, int, int, int]


class Drawing:
    """A screen or page that is drawn, the boxes of what it shows, and what can be asked of it.

    Args:
        draw: Draws all that is random.
        is_screen: Draw a screen, not a page.
    """

    def __init__(self, draw: random.Random, is_screen: bool) -> None:
        self.draw = draw
        backs = [(250, 250, 250), (32, 33, 36), (226, 236, 248)] if is_screen else [(255, 255, 255), (250, 244, 228)]
        self.canvas = Canvas(draw, SIDE, SIDE, draw.choice(backs))
        self.boxes: list[tuple[str, Box]] = []
        title = draw.choice(_TITLES)
        fore = self.canvas.fore
        if is_screen:
            self.canvas.pen.rectangle((0, 0, SIDE, _BAR - 1), fill=draw.choice([(30, 60, 110), (20, 20, 20)]))
            fore = (255, 255, 255)
        size = draw.randint(32, 34)
        left = draw.randint(4, 20)
        self.canvas.write("title", left, 8, title, size, SIDE, fore)
        rows, columns = np.nonzero(self.canvas.label_HW)
        self.boxes.append((title, (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)))
        has_table = draw.random() < 0.5
        cards = draw.randint(1, 2 if has_table else 3) if is_screen else 0
        colour = draw.choice(list(COLOURS))
        shown = ["button", *["card"] * cards] if is_screen else ["picture"]
        shown += ["table"] * has_table
        shown += draw.choices(["text", _BLANK], k=4 - len(shown))
        draw.shuffle(shown)
        self.questions = [Question("title", "Which word is the title?", title)]
        self.questions.append(Question("table", "Is there a table?", "yes" if has_table else "no"))
        if is_screen:
            self.questions.append(Question("colour", "What colour is the button?", colour))
            self.questions.append(Question("count", "How many cards are there?", str(cards)))
        for name, place in zip(shown, _CORNERS):
            self._show(name, colour, *_CORNERS[place])
            if name in ("button", "table", "picture"):
                self.questions.append(Question("where", f"Where is the {name}?", place))

    def _show(self, name: str, colour: str, column: int, row: int) -> None:
        """Draw what a cell shows, somewhere in it."""
        width, height = _SIZES[name]
        x = column * _WIDTH + self.draw.randint(3, _WIDTH - width - 3)
        y = _BAR + row * _HEIGHT + self.draw.randint(3, _HEIGHT - height - 3)
        box = (x, y, x + width, y + height)
        pen = self.canvas.pen
        if name == "button":
            pen.rounded_rectangle(box, 8, fill=COLOURS[colour])
            self.canvas.write("button", x + 8, y + 8, self.canvas.words(1).title(), 15, width - 12, (255, 255, 255))
            name = f"{colour} button"
        elif name == "card":
            pen.rounded_rectangle(box, 10, outline="gray", width=3)
            self.canvas.write("text", x + 8, y + 8, self.canvas.words(1).title(), 16, width - 12)
        elif name == "table":
            self.canvas.table(x, y, width, 2, 2)
        elif name == "picture":
            self.canvas.photo(x, y, width, height)
        elif name == "text":
            for line in range(2):
                self.canvas.write("text", x, y + 22 * line, self.canvas.words(5), 15, width)
        if name != _BLANK:
            self.boxes.append((name, box))

    def things(self, file: str) -> list[Thing]:
        """Return what the squares show of whose area a box covers the most, if that is half of it."""
        side = _SQUARE * PATCH
        shown_HW = np.zeros((SIDE, SIDE), int)
        for number, (_, (left, top, right, bottom)) in enumerate(self.boxes, 1):
            shown_HW[top:bottom, left:right] = number
        found = list[Thing]()
        blank = list[Thing]()
        for row in range(0, SIDE, side):
            for column in range(0, SIDE, side):
                areas = np.bincount(shown_HW[row : row + side, column : column + side].ravel()) / side**2
                most = int(areas.argmax())
                corner = (column / SIDE, row / SIDE)
                if most and areas[most] >= 0.5:
                    found.append(Thing(file, self.boxes[most - 1][0], corner, side / SIDE))
                elif areas[0] == 1:
                    blank.append(Thing(file, _BLANK, corner, side / SIDE))
        return [*found, *self.draw.sample(blank, min(len(blank), _BLANK_SQUARES))]


def are_in(questions: Path) -> bool:
    """Return whether the questions of a folder are about screens and pages."""
    return (questions / f"{_SCREENS}.json").exists()


def write_questions(target: Path, seed: int = 0) -> None:
    """Write pictures and questions, as many of screens as of pages."""
    draw = random.Random(seed)
    (target / PICTURES).mkdir(parents=True, exist_ok=True)

    def saved(drawing: Drawing, name: str) -> str:
        file = f"{PICTURES}/{name}.png"
        drawing.canvas.picture.save(target / file)
        return file

    training = list[dict[str, Any]]()
    things = list[Thing]()
    for number in range(TRAINING_PICTURES):
        drawing = Drawing(draw, is_screen=number % 2 == 0)
        file = saved(drawing, f"training{number}")
        things += drawing.things(file)
        training.append(conversation(file, draw.sample(drawing.questions, min(_ASKED, len(drawing.questions)))))
    held_out: dict[str, list[dict[str, Any]]] = {_SCREENS: [], "pages": []}
    for name, chats in held_out.items():
        while len(chats) < HELD_OUT:
            drawing = Drawing(draw, is_screen=name == _SCREENS)
            file = saved(drawing, f"{HELD_OUT_PICTURE}-{name}{len(chats)}")
            chats.extend(conversation(file, [one]) for one in draw.sample(drawing.questions, _PER_PICTURE))
    write(target, training, things, held_out)
