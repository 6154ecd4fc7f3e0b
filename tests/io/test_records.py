from pathlib import Path

import pytest

from mmod.io.records import FolderTakenError, read_record, record_config

RECORD = {"lr": 1e-4, "sizes": (1, 2), "data": {"name": "2020-01-01", "seed": 3}, "args": {}}


@pytest.mark.parametrize("file", ["config.yaml", "config.json"])
def test_a_record_claims_its_folder_once(tmp_path: Path, file: str) -> None:
    def is_recorded(free_keys: tuple[str, ...] = (), **changes: object) -> bool:
        record = {**RECORD, **changes}
        return record_config(tmp_path / "run", record, file=file, kind="a run", free_keys=free_keys)

    assert not is_recorded()
    written = (tmp_path / "run" / file).read_bytes()
    assert is_recorded()
    assert is_recorded(("data.seed",), data={"name": "2020-01-01", "seed": 4})
    with pytest.raises(FolderTakenError) as error:
        is_recorded(lr=0.1, data={"name": "2020-01-01", "seed": 4}, extra=None, args={"x": 1})
    assert str(error.value).endswith(
        "Differing keys: args.x: not set there, 1 now; data.seed: 3 there, 4 now; lr: 0.0001 there, 0.1 now"
    )
    assert (tmp_path / "run" / file).read_bytes() == written


@pytest.mark.parametrize("name", ["notes.txt", "data/image.png"])
def test_a_folder_with_other_files_is_not_taken(tmp_path: Path, name: str) -> None:
    # Left by a start that failed before it kept its record.
    (tmp_path / "checkpoints" / "empty").mkdir(parents=True)
    (tmp_path / ".config.json.partial").touch()
    assert read_record(tmp_path, "config.json") is None
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(FolderTakenError, match=r"holds files but no config\.json: choose a new or empty folder"):
        record_config(tmp_path, RECORD, file="config.json", kind="a run")
    with pytest.raises(FileExistsError, match="is a file, and a folder is needed there: name another folder"):
        record_config(tmp_path / name, RECORD, file="config.json", kind="a run")
