"""The table of a user's cuts: reading, writing, and who asks it."""

import json

import pytest
import torch

import flashtile
from flashtile._backends import tuned
from flashtile._backends.devices import KNOWN_DEVICES
from flashtile._backends.tuned import Tuned, TunedRow, as_data
from flashtile.ops.attention.gpu.tile_configs import TileKey, choose_tiles
from flashtile.ops.attention.triton import invariant_tiles
from flashtile.ops.common.split_keys.configs import TileKey as DecodingKey
from flashtile.ops.common.split_keys.configs import choose_tiles as choose_decoding

GPU, KEY = "NVIDIA GeForce RTX 4090", TileKey(torch.bfloat16, 128, 128, True, "long")
ROW = TunedRow("attention.dq", as_data(KEY), {"block_m": 32, "num_stages": 1}, 1.0, 1.5)
ADA = KNOWN_DEVICES["sm_89"]


def test_a_row_serves_calls_with_its_key():
    tuned_ada, shipped = ADA._replace(tuned=Tuned([ROW])), choose_tiles("dq", ADA, KEY)
    expected = shipped._replace(block_m=32, num_stages=1)
    assert expected != shipped
    assert choose_tiles("dq", tuned_ada, KEY) == expected
    assert choose_tiles("dq", tuned_ada, KEY._replace(head_dim=80)) == expected, "heads as wide in tiles"
    for other in (KEY._replace(length="medium"), KEY._replace(banded=False), KEY._replace(dtype=torch.float16)):
        assert choose_tiles("dq", tuned_ada, other) == choose_tiles("dq", ADA, other)
    assert choose_tiles("dkdv", tuned_ada, KEY) == choose_tiles("dkdv", ADA, KEY), "another choice"


def test_rows_of_caches_serve_as_many_rows_as_a_tile_has():
    key = DecodingKey(torch.bfloat16, 128, 128, 16, 16)
    row = TunedRow("decoding", as_data(key), {"block_n": 32}, 1.0, 1.5)
    for rows in (1, 4, 16):
        assert choose_decoding(ADA._replace(tuned=Tuned([row])), key._replace(rows=rows)).block_n == 32
    assert choose_decoding(ADA._replace(tuned=Tuned([row])), key._replace(rows=17)).block_n != 32


def test_the_batch_invariant_mode_does_not_ask():
    row = TunedRow("attention.forward", as_data(KEY), {"block_n": 16}, 1.0, 1.5)
    given = torch.bfloat16, 128, 128, True
    assert invariant_tiles(*given, ADA._replace(tuned=Tuned([row])), False) == invariant_tiles(*given, ADA, False)


def test_a_file_is_what_was_written(tmp_path):
    path = tmp_path / "new" / "table.json"
    tuned.write(path, GPU, [ROW])
    found = tuned.read(path, GPU)
    assert (list(found.rows), found.source) == ([ROW], str(path))
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]
    assert json.loads(path.read_text())["flashtile"] == flashtile.__version__


@pytest.mark.parametrize(
    "change, why",
    [
        ({"triton": "3.1.0"}, "it is for triton 3.1.0, and here is"),
        ({"flashtile": "0.0.1"}, "it is for flashtile 0.0.1, and here is"),
        ({"gpu": "NVIDIA L4"}, "it is for gpu NVIDIA L4, and here is NVIDIA GeForce RTX 4090"),
        ({"rows": [ROW._asdict() | {"cut": {"block_m": "32"}}]}, "it has a row that is none"),
        ({"rows": [ROW._asdict() | {"key": 7}]}, "it has a row that is none"),
        ({"rows": [{"choice": "attention.dq"}]}, "it cannot be read"),
        ({"rows": None}, "it cannot be read"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_does_not_fit_is_refused(tmp_path, change, why):
    path = tmp_path / "table.json"
    tuned.write(path, GPU, [ROW])
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=why):
        tuned.read(path, GPU)


def test_a_gpu_reads_the_users_table(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    assert tuned.table_for(GPU) is None
    path = tuned.path_for(GPU)
    assert path == tmp_path / "flashtile" / "tuned-nvidia-geforce-rtx-4090.json"
    tuned.write(path, GPU, [ROW])
    assert [*tuned.table_for(GPU).rows] == [ROW]
    assert tuned.table_for("NVIDIA L4") is None
    path.write_text("{")
    with pytest.warns(
        UserWarning, match=r"does not use the tuned table .*`flashtile tune` again, or `flashtile tune --r"
    ):
        assert tuned.table_for(GPU) is None


def test_the_variable_names_another_table_or_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned.write(tuned.path_for(GPU), GPU, [])
    tuned.write(tmp_path / "mine.json", GPU, [ROW])
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "mine.json"))
    assert [*tuned.table_for(GPU).rows] == [ROW]
    monkeypatch.setenv(tuned.VARIABLE, "0")
    assert tuned.table_for(GPU) is None
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "none.json"))
    with pytest.warns(UserWarning, match="unset FLASHTILE_TUNED"):
        assert tuned.table_for(GPU) is None


def test_questions_are_heard_once():
    with tuned.watching() as found:
        for _ in range(2):
            choose_tiles("dq", ADA, KEY)
        choose_tiles("dkdv", ADA, KEY)
    choose_tiles("forward", ADA, KEY)
    assert [lookup.choice for lookup in found] == ["attention.dq", "attention.dkdv"]
    assert found[0] == ("attention.dq", ADA, KEY, choose_tiles("dq", ADA, KEY))
