"""`flashtile tune`: candidates, what is measured, what is kept, and the command."""

import itertools
import re
import time

import pytest
import torch
from typer.testing import CliRunner

import flashtile
from flashtile._backends import tuned
from flashtile._backends.devices import KNOWN_DEVICES, device_facts
from flashtile._backends.tuned import TunedRow, as_data
from flashtile.cli.app import app
from flashtile.cli.call import Calls
from flashtile.cli.tune import _lookups
from flashtile.ops.attention.gpu.tile_configs import choose_tiles
from flashtile.tuning import command, measure
from flashtile.tuning.measure import CHOICES

CPU = torch.device("cpu")
#: Small calls of every operation.
CALLS = Calls(
    head_dim=[16], dtype=["fp16"], seq=[64], causal=True, backend="triton", heads=4, width=[32], vocabulary=[64],
    page_size=[16],
)  # fmt: skip


def lookups(**changes) -> list[tuned.Lookup]:
    return _lookups(Calls(**{**vars(CALLS), **changes}), CPU)


@pytest.mark.parametrize("arch", KNOWN_DEVICES)
def test_candidates_are_cuts_that_a_device_may_take(arch):
    asked = lookups(head_dim=[64, 128, 256], dtype=["bf16", "fp32"], width=[1024, 20000], vocabulary=[50257])
    with tuned.watching() as of_attention:
        for head_dim, dtype in itertools.product((64, 128, 256), (torch.bfloat16, torch.float32)):
            q = torch.empty(4, 4096, 16, head_dim, dtype=dtype, device="meta")
            flashtile.explain(q, q, q, device=arch, backend="triton", causal=True)
    asked += of_attention
    device = KNOWN_DEVICES[arch]

    for lookup in asked:
        found = [*CHOICES[lookup.choice].candidates(device, lookup.key, lookup.shipped)]
        assert lookup.shipped not in found and len(set(found)) == len(found) < 100
        for cut in found:
            assert type(cut) is type(lookup.shipped)
            assert cut.num_warps * device.warp_size <= 1024
            assert all(size & (size - 1) == 0 for name, size in cut._asdict().items() if name.startswith("block"))


def test_candidates_of_hopper_are_rows_of_its_tables():
    q = torch.empty(4, 4096, 16, 128, dtype=torch.bfloat16, device="meta")
    with tuned.watching() as found:
        flashtile.explain(q, q, q, causal=True, device="h100")
    assert [lookup.choice for lookup in found] == ["attention.hopper.forward", "attention.hopper.backward"]
    for lookup in found:
        rows = [*CHOICES[lookup.choice].candidates(lookup.device, lookup.key, lookup.shipped)]
        assert 3 <= len(rows) <= 16 and lookup.shipped not in rows


@pytest.mark.interpreter
def test_what_is_asked():
    names = [lookup.choice for lookup in lookups()]
    assert (
        names
        == ["attention.forward", "attention.dq", "decoding", "decoding"]
        + ["norm.forward"]
        + ["norm.backward"] * 4
        + ["cross_entropy"] * 4
    )
    assert {lookup.choice for lookup in lookups(operations=["losses"])} == {"cross_entropy"}


def test_a_program_says_what_it_asks(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch, flashtile\n"
        "q = torch.empty(2, 100, 4, 64, dtype=torch.float16, device='meta')\n"
        "flashtile.explain(q, q, q, device='a100')\n"
        "sys.exit(0 if sys.argv[1:] == ['--steps', '10'] else 3)\n"
    )
    found = lookups(program=f"{program} --steps 10")
    assert [(lookup.choice, lookup.key.head_dim) for lookup in found] == [
        (f"attention.{kernel}", 64) for kernel in ("forward", "dq", "dkdv")
    ]
    with pytest.raises(SystemExit):
        lookups(program=f"{program} --steps 11")


@pytest.fixture
def fake_times(monkeypatch):
    """Times by the cut that serves: those that `times` has by `num_warps`."""

    def install(times: dict[int, float]):
        def milliseconds(problem, seconds):
            problem()
            (row,) = device_facts(CPU).tuned.rows
            return times.get(row.cut["num_warps"], 10.0)

        monkeypatch.setattr(measure, "_milliseconds", milliseconds)
        monkeypatch.setattr(measure, "_ROUNDS", 2)

    return install


def tune(lookup: tuned.Lookup, until: float = float("inf")) -> TunedRow:
    return measure.tune(lookup, CPU, 4, None, until, lambda what: None)


def with_warps(monkeypatch, lookup: tuned.Lookup, *warps: int) -> None:
    """Candidates that differ from the shipped cut in warps alone."""
    cuts = [lookup.shipped._replace(num_warps=each) for each in warps]
    choice = CHOICES[lookup.choice]._replace(candidates=lambda *given: cuts)
    monkeypatch.setitem(CHOICES, lookup.choice, choice)


@pytest.mark.interpreter
def test_the_fastest_right_cut_wins(monkeypatch, fake_times):
    for _, (lookup, *_) in itertools.groupby(lookups(), key=lambda lookup: lookup.choice):
        own = lookup.shipped.num_warps
        with_warps(monkeypatch, lookup, 2 * own, 4 * own)
        fake_times({own: 3.0, 2 * own: 2.0, 4 * own: 1.0})
        row = tune(lookup)
        fastest = as_data(lookup.shipped._replace(num_warps=4 * own))
        assert row == (lookup.choice, as_data(lookup.key), fastest, 1.0, 3.0)


@pytest.mark.interpreter
def test_the_shipped_cut_stays_where_none_is_much_faster(monkeypatch, fake_times):
    (lookup,) = lookups(operations=["norms"])[:1]
    own = lookup.shipped.num_warps
    with_warps(monkeypatch, lookup, 2 * own, 4 * own)
    fake_times({own: 3.0, 2 * own: 2.98, 4 * own: 3.5})
    assert tune(lookup).cut == as_data(lookup.shipped), "too little is gained"
    assert tune(lookup, until=time.monotonic() - 1)[2:] == (as_data(lookup.shipped), 3.0, 3.0), "the time was over"


@pytest.mark.interpreter
def test_wrong_and_failing_cuts_do_not_win(monkeypatch, fake_times):
    lookup = lookups(operations=["attention"])[0]
    own = lookup.shipped.num_warps
    with_warps(monkeypatch, lookup, 2 * own, 4 * own, 8 * own)
    make, served = CHOICES[lookup.choice].problem, []

    def problem(*given):
        right = make(*given)

        def call():
            table = device_facts(CPU).tuned
            warps = table.rows[0].cut["num_warps"] if table else own
            served.append(warps)
            if warps == 2 * own:
                return [result + 1 for result in right()]
            if warps == 4 * own:
                raise RuntimeError("out of resources")
            return [result * float("nan") for result in right()] if warps == 8 * own else right()

        return call

    monkeypatch.setitem(CHOICES, lookup.choice, CHOICES[lookup.choice]._replace(problem=problem))
    fake_times({own: 9.0})
    row = tune(lookup)
    assert (row.cut, row.ms) == (as_data(lookup.shipped), 9.0)
    assert {own, 2 * own, 4 * own, 8 * own} == set(served)


@pytest.mark.interpreter
def test_rows_are_kept_and_served(monkeypatch, fake_times, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = lookups(operations=["norms"])[:2]
    for lookup in asked:
        with_warps(monkeypatch, lookup, 2 * lookup.shipped.num_warps)
    fake_times({8: 1.0})
    table, said = command.TunedTable(CPU), []
    outcomes = [*command.tune_all(asked, table, CPU, 600, lambda done, what: said.append((done, what)))]
    assert [outcome.row.cut["num_warps"] for outcome in outcomes] == [8, 8]
    assert said[-1] == (1, "norm.backward: timing 1 of 1 cuts")
    again = command.TunedTable(CPU)
    assert again.rows == [outcome.row for outcome in outcomes] and all(map(again.has, asked))
    with tuned.using(tuned.read(again.path, again.gpu)):
        facts = device_facts(CPU)
        assert tuned.choose(*asked[0][:1], facts, *asked[0][2:]).num_warps == 8
    again.reset()
    assert not command.TunedTable(CPU).rows


def test_what_is_not_tuned_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = lookups(operations=["norms"])
    latent = lookups(operations=["decoding"])[0]
    latent = latent._replace(key=latent.key._replace(head_dim=576, head_dim_v=512))
    unknown = latent._replace(choice="attention.column_sums")
    table = command.TunedTable(CPU)
    outcomes = [*command.tune_all([latent, unknown], table, CPU, 600, lambda *said: None, jobs=1)]
    assert [outcome.why for outcome in outcomes] == [
        "latent rows, and rows that begin between words are not tuned", "it is not tuned",
    ]  # fmt: skip
    outcomes = [*command.tune_all(asked, table, CPU, -1, lambda *said: None, jobs=1)]
    assert all(outcome.unfinished and "run the command again" in outcome.why for outcome in outcomes)
    assert not table.rows


def test_command_without_a_gpu():
    for options in ([], ["--show"]):
        result = CliRunner().invoke(app, ["tune", *options])
        assert result.exit_code == 2 and "there is no GPU here" in result.output


def test_command_without_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("flashtile.tuning.triton_missing", lambda: "it is not here")
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 2 and "nothing to tune without Triton: it is not here" in result.output


def test_managing_a_table(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("flashtile.cli.tune._gpu", lambda: CPU)

    def run(*options) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["tune", *options], env={"COLUMNS": "200"})
        return result.exit_code, re.sub(r"\s+", " ", result.output)

    assert run("--show") == (1, "there is no table for interpreter; flashtile tune makes one ")
    lookup = lookups(operations=["losses"])[0]
    command.TunedTable(CPU).add(TunedRow(lookup.choice, as_data(lookup.key), as_data(lookup.shipped), 0.1, 0.15))
    code, shown = run("--show")
    assert code == 0 and "cross_entropy: width 64, itemsize 2, vector 8" in shown and "1.50 ×" in shown
    code, said = run("--export", str(tmp_path / "mine.json"))
    assert code == 0 and "makes a process use it" in said
    assert [*tuned.read(tmp_path / "mine.json", "interpreter").rows] == command.TunedTable(CPU).rows
    assert run("--reset")[0] == 0 and run("--show")[0] == 1


@pytest.mark.parametrize(
    "options, message",
    [(["dense"], "expected some of attention, decoding"), (["--heads", "6"], "expected a divisor of --heads 6, got 4")],
    ids=["operation", "heads"],
)
def test_bad_requests(monkeypatch, tmp_path, options, message):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("flashtile.cli.tune._gpu", lambda: CPU)
    result = CliRunner().invoke(app, ["tune", *options])
    assert result.exit_code == 2 and message in result.output


def test_explain_says_where_tiles_come_from():
    q = torch.empty(4, 4096, 16, 64, dtype=torch.bfloat16, device="meta")
    assert {kernel.tiles_from for kernel in flashtile.explain(q, q, q, device="h100").kernels} == {"measured"}
    explanation = flashtile.explain(q, q, q, device="rtx4090")
    assert {kernel.tiles_from for kernel in explanation.kernels} == {"predicted"}
    assert str(explanation).count("predicted (flashtile tune measures)") == 3


@pytest.mark.alone
@pytest.mark.hopper
def test_from_the_table_of_sm_80_on_a_hopper_card(monkeypatch, tmp_path):
    """Tiles within 5 % of the rows for sm_90, in at most 3 minutes, though the search begins with those for sm_80; and
    Hopper's own rows no slower than they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device, begin = torch.device("cuda"), time.monotonic()
    calls = Calls(operations=["attention"], head_dim=[128], seq=[4096], causal=True)
    portable = _lookups(Calls(**{**vars(calls), "backend": "triton"}), device)
    started = [
        lookup._replace(shipped=choose_tiles(lookup.choice.split(".")[1], KNOWN_DEVICES["sm_80"], lookup.key))
        for lookup in portable
    ]
    table = command.TunedTable(device)
    found = [*command.tune_all(started, table, device, 180, lambda *said: None)]
    assert time.monotonic() - begin <= 180 and not any(outcome.unfinished for outcome in found)
    again = [*command.tune_all(portable, table, device, 180, lambda *said: None)]
    for tuned_row, own in itertools.zip_longest(found, again):
        assert tuned_row.row.ms <= 1.05 * own.row.shipped_ms and own.row.ms <= own.row.shipped_ms
    for outcome in command.tune_all(_lookups(calls, device), table, device, 180, lambda *said: None):
        assert outcome.row.ms <= outcome.row.shipped_ms
