from functools import partial

from mmod.data.synthetic.digits import DIGITS
from tests.kit.scripts import run_script

run = partial(run_script, "datasets/digits.py")


def test_a_difficulty_gives_defaults_and_flags_change_them(tmp_path):
    done = run(str(tmp_path / "set"), "--difficulty", "tiny")
    assert done.returncode == 0, done.stderr
    assert "train-000003.tar: 64 scenes" in done.stdout
    # Raises if the script had built anything else.
    DIGITS.build(tmp_path / "set", "tiny")
    done = run(str(tmp_path / "set"), "--difficulty", "tiny", "--clutter", "1", "--scenes.train", "9")
    assert done.returncode != 0
    assert "clutter: 4 there, 1 now" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_picture_is_drawn_and_never_overwritten(tmp_path):
    path = tmp_path / "scenes.png"
    assert run("--montage", str(path)).returncode == 0
    drawn = path.read_bytes()
    assert len(drawn) < 100_000
    assert run("--montage", str(path)).returncode != 0
    assert path.read_bytes() == drawn
