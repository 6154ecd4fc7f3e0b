"""Photographs of Caltech-101, pictures of several of them, and questions about both, in LLaVA's format.

The folder that is written holds `train.json`, `naming.json` and `places.json`, and the pictures that they name. Every
conversation has one picture. Those of training have several questions, each to be answered by itself. `things.json`
says what each training picture shows, and where.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from scripts.real_halves.questions import PICTURES, Question, Thing, conversation, write

PATCHES = 10
"""Patches a side of the pictures in training."""
SIDE = 224
"""Side of the pictures in pixels."""
_CELL = SIDE // 2
# The mean of ImageNet, which the tower's normalization turns into zeros.
_EMPTY = (124, 116, 104)
_FOLDERS = {
    "Faces": "person",
    "Faces_easy": "face",
    "Leopards": "leopard",
    "Motorbikes": "motorbike",
    "airplanes": "airplane",
    "car_side": "car",
}
_UNNAMED = "BACKGROUND_Google"
# Larger pictures of the same people as "face".
_NOT_IN_SCENES = "person"
_CORNERS = {"top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1)}
_STEPS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
TRAINING_SCENES = 5000
IN_SCENES = 24
HELD_OUT = 500
_PER_SCENE = 2
_PER_TRAINING_SCENE = 6
_NAMING = "What is this?"


def spoken(folder: str) -> str:
    """Return the name of a class from that of its folder."""
    return _FOLDERS.get(folder, folder.replace("_", " ").lower())


@dataclass(frozen=True)
class Photograph:
    """A photograph of one class: its file below the folder of all classes, and the name of the class."""

    file: str
    name: str


def photographs(folder: Path, split: str) -> list[Photograph]:
    """Return the photographs of a split, "train" or "test", apart from those without a class."""
    files = (folder / f"{split}.txt").read_text().split()
    classes = ((file, file.partition("/")[0]) for file in files)
    return [Photograph(file, spoken(name)) for file, name in classes if name != _UNNAMED]


@dataclass(frozen=True)
class Scene:
    """Photographs on a grid of 2 x 2 cells.

    Args:
        cells: Column and row in cells to what is there; two photographs may stand between rows or columns.
        questions: What can be asked of it.
    """

    cells: dict[tuple[float, float], Photograph]
    questions: list[Question]

    def draw(self, folder: Path) -> Image.Image:
        """Return the picture; every photograph is squeezed into its cell."""
        canvas = Image.new("RGB", (SIDE, SIDE), _EMPTY)
        for (column, row), photograph in self.cells.items():
            with Image.open(folder / photograph.file) as picture:
                cell = picture.convert("RGB").resize((_CELL, _CELL), Image.Resampling.BICUBIC)
            canvas.paste(cell, (round(column * _CELL), round(row * _CELL)))
        return canvas


def is_there(names: Sequence[str], known: Sequence[str], draw: random.Random) -> Question:
    """Return a question whether something is there, which is as often answered by no."""
    if draw.random() < 0.5:
        return Question("exists", f"Is there a {draw.choice(names)}?", "yes")
    return Question("exists", f"Is there a {draw.choice([name for name in known if name not in names])}?", "no")


def pair(chosen: Sequence[Photograph], known: Sequence[str], draw: random.Random) -> Scene:
    """Return two photographs side by side, or one above the other, at any height or width."""
    shifts = [draw.random(), draw.random()]
    if draw.random() < 0.5:
        cells = {(0.0, shifts[0]): chosen[0], (1.0, shifts[1]): chosen[1]}
        places = ("on the left", "on the right")
    else:
        cells = {(shifts[0], 0.0): chosen[0], (shifts[1], 1.0): chosen[1]}
        places = ("at the top", "at the bottom")
    questions = [Question("side", f"What is {place}?", one.name) for place, one in zip(places, chosen)]
    return Scene(cells, [*questions, is_there([one.name for one in chosen], known, draw)])


def grid(chosen: Sequence[Photograph], known: Sequence[str], draw: random.Random) -> Scene:
    """Return four photographs of different classes in a grid."""
    cells = dict(zip(_CORNERS.values(), chosen))
    questions = [Question("corner", f"What is at the {name}?", cells[cell].name) for name, cell in _CORNERS.items()]
    for (column, row), one in cells.items():
        for relation, (right, down) in _STEPS.items():
            other = cells.get((column + right, row + down))
            if other is not None:
                questions.append(Question("beside", f"What is {relation} the {one.name}?", other.name))
    questions.append(is_there([one.name for one in chosen], known, draw))
    return Scene({(float(column), float(row)): one for (column, row), one in cells.items()}, questions)


def count(chosen: Sequence[Photograph], by_name: dict[str, list[Photograph]], draw: random.Random) -> Scene:
    """Return a grid in which one class is seen once to four times, and a question how often."""
    name = chosen[0].name
    number = draw.randint(1, 4)
    seen = [*draw.sample(by_name[name], number), *chosen[1 : 5 - number]]
    draw.shuffle(seen)
    cells = {(float(column), float(row)): one for (column, row), one in zip(_CORNERS.values(), seen)}
    return Scene(cells, [Question("count", f"How many times is there a {name}?", str(number))])


def frequent(of: Sequence[Photograph]) -> list[str]:
    """Return the classes of scenes, the most frequent ones.

    They are few, as few patches show each photograph: of all 101, a linear classifier names 46 % in a grid.
    """
    counts = Counter(photograph.name for photograph in of if photograph.name != _NOT_IN_SCENES)
    return [name for name, _ in counts.most_common(IN_SCENES)]


def scenes(of: Sequence[Photograph], known: Sequence[str], number: int, draw: random.Random) -> Iterator[Scene]:
    """Yield scenes of known classes: two fifths are pairs, two fifths grids, a fifth grids to be counted."""
    by_name = {name: [photograph for photograph in of if photograph.name == name] for name in known}
    for _ in range(number):
        # All classes are as frequent, and those of a scene differ.
        chosen = [draw.choice(by_name[name]) for name in draw.sample(known, 4)]
        kind = draw.random()
        if kind < 0.4:
            yield pair(chosen[:2], known, draw)
        elif kind < 0.8:
            yield grid(chosen, known, draw)
        else:
            yield count(chosen, by_name, draw)


def write_questions(source: Path, target: Path, seed: int = 0) -> None:
    """Write pictures and questions of `source`, a folder with `train.txt`, `test.txt` and the classes' folders."""
    pictures = source / "101_ObjectCategories"
    draw = random.Random(seed)
    (target / PICTURES).mkdir(parents=True, exist_ok=True)
    train, test = photographs(source, "train"), photographs(source, "test")
    known = sorted({photograph.name for photograph in train})
    draw.shuffle(train)
    chats = list[dict[str, Any]]()
    things = list[Thing]()
    for one in train:
        name = Question("name", _NAMING, one.name)
        file = _written(whole(pictures / one.file), target, f"photograph{len(chats)}")
        things.append(Thing(file, one.name, (0.0, 0.0), 1.0))
        chats.append(conversation(file, [name, is_there([one.name], known, draw)]))
    for number, scene in enumerate(scenes(train, frequent(train), TRAINING_SCENES, draw)):
        asked = draw.sample(scene.questions, min(_PER_TRAINING_SCENE, len(scene.questions)))
        file = _written(scene.draw(pictures), target, f"scene{number}")
        things += [Thing(file, one.name, (column / 2, row / 2), 0.5) for (column, row), one in scene.cells.items()]
        chats.append(conversation(file, asked))
    draw.shuffle(chats)
    naming = list[dict[str, Any]]()
    for number, one in enumerate(draw.sample(test, HELD_OUT)):
        file = _written(whole(pictures / one.file), target, f"tested-photograph{number}")
        naming.append(conversation(file, [Question("name", _NAMING, one.name)]))
    places = list[dict[str, Any]]()
    for number, scene in enumerate(scenes(test, frequent(train), HELD_OUT, draw)):
        if len(places) >= HELD_OUT:
            break
        file = _written(scene.draw(pictures), target, f"tested-scene{number}")
        asked = draw.sample(scene.questions, min(_PER_SCENE, len(scene.questions)))
        places.extend(conversation(file, [question]) for question in asked)
    write(target, chats, things, {"naming": naming, "places": places[:HELD_OUT]})


def whole(file: Path) -> Image.Image:
    """Return a photograph, squeezed into a picture."""
    with Image.open(file) as picture:
        return picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def _written(picture: Image.Image, target: Path, name: str) -> str:
    picture.save(target / PICTURES / f"{name}.jpg", quality=95)
    return f"{PICTURES}/{name}.jpg"
