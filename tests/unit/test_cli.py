"""The command line, through click's runner: what each command prints, exit codes, and one readable line for wrong input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from oxidnn import report
from oxidnn.cli import arguments, inspection, measuring, running
from oxidnn.cli.main import main
from oxidnn.device import known_device
from oxidnn.dispatch.tuning_db import TuningDb
from oxidnn.ops import OPS
from oxidnn.runtime.emu_backend import EmulatedBackend

from .fakes import FakeBackend, FakeEngine, double_op  # noqa: F401

# ruff: noqa: F811

CASE = "gemm a=f32[4,8] b=f32[8,4]"
FULL = "gemm a=f32[4,8]nchw b=f32[8,4]nchw d=f32[4,4]nchw"
DOUBLE = "double x=f32[64]nchw y=f32[64]nchw"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OXIDNN_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("OXIDNN_DEVICE", "OXIDNN_VERBOSE", "OXIDNN_ENGINES", "OXIDNN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(report, "_said", set())


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch, double_op) -> FakeBackend:  # type: ignore[no-untyped-def]
    backend = FakeBackend()
    monkeypatch.setenv("OXIDNN_DEVICE", "emu:sm_90a")  # tune measures an emulated device only where it is named
    for module in (arguments, inspection, measuring, running):
        monkeypatch.setattr(module, "open_backend", lambda device: backend)
    double_op(FakeEngine("double.wrong", "wrong", 1.0, estimates=(1.0,)), FakeEngine("double.right", "right", 4.0, estimates=(2.0, 3.0)))
    return backend


def run(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, list(words))
    assert result.exit_code == code, result.output + result.stderr + repr(result.exception)
    return result


def fails(*words: str) -> str:
    """The message of a command that must fail with exit code 2 and no traceback."""
    result = run(*words, code=2)
    assert "Traceback" not in result.output + result.stderr
    assert result.stdout == ""
    return result.stderr


# ---- the frame ----------------------------------------------------------------------------------------------------------------------


def test_help_names_every_command_and_every_command_has_help() -> None:
    text = run("--help").output
    for name in ("info", "explain", "dump", "tune", "bench", "repro", "emu", "cache"):
        assert name in text
        assert "Usage:" in run(name, "--help").output
    assert "0.1.0" in run("--version").output


@pytest.mark.parametrize("command", ["explain", "dump", "tune", "bench", "repro", "emu"])
@pytest.mark.parametrize("words, said", [
    (("gemm a=f32[4,8] b=f32[7,4]",), "inner extent of b is 7 (expected 8"), (("nonsense x=f32[2]",), "'nonsense' is no op"),
    (("gemm", "a=f32[4,8]"), "b is missing"), ((CASE + " colour=red",), "'colour' is no attribute"), (("gemm a='f32",), "cannot be read"),
])
def test_wrong_cases(command: str, words: tuple[str, ...], said: str) -> None:
    message = fails(command, *words)
    assert message.startswith("oxidnn: error: ") and said in message and len(message.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["explain", "dump", "tune", "bench", "repro", "emu", "info"])
def test_wrong_device(command: str) -> None:
    words = () if command == "info" else (CASE,)
    assert "device" in fails(command, *words, "--device", "tpu:0") and "cuda:N" in fails("info", "--device", "tpu:0")


@pytest.mark.parametrize("words, said", [
    (("frobnicate",), "No such command"), (("explain",), "Missing argument"), (("emu",), "Missing argument"),
    (("tune", "--batch", "-1"), "--batch"), (("tune", "--layout", "chwn"), "--layout"), (("bench", CASE, "--repeats", "0"), "--repeats"),
    (("dump", CASE, "--no-such"), "No such option"),
])
def test_wrong_usage(words: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, list(words))
    assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.stderr


def test_debug_lets_the_exception_through() -> None:
    result = CliRunner().invoke(main, ["--debug", "explain", "nonsense"])
    assert result.exception is not None and "no op" in str(result.exception)


def test_an_internal_error_says_so(fake_device: FakeBackend, double_op) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.bug", "bug"))
    message = fails("bench", DOUBLE, "--no-check")
    assert "internal error: TypeError: a mistake in the library" in message and "--debug" in message


def test_module_entry_point() -> None:
    done = subprocess.run([sys.executable, "-m", "oxidnn", "explain", "nonsense"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("oxidnn: error: case: 'nonsense' is no op")


def test_importing_oxidnn_imports_neither_click_nor_rich() -> None:
    code = "import sys, oxidnn, oxidnn.handle; sys.exit(any(m in sys.modules for m in ('click', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# ---- looking ------------------------------------------------------------------------------------------------------------------------


def test_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OXIDNN_TUNE", "off")
    facts = json.loads(run("info", "--device", "emu:sm_80", "--json").stdout)
    assert facts["device"]["arch"] == "sm_80" and facts["versions"]["oxidnn"] == "0.1.0"
    assert facts["switches"]["OXIDNN_TUNE"]["source"] == "environment" and facts["switches"]["OXIDNN_MATH"]["source"] == "default"
    assert facts["ops"]["gemm"] >= 1
    text = run("info", "--device", "emu:sm_80").stdout
    assert "OXIDNN_TUNE" in text and "emulated sm_80" in text and "tuning database" in text


@pytest.mark.parametrize("words", [(CASE,), ("gemm", "a=f32[4,8]", "b=f32[8,4]")])
def test_explain(words: tuple[str, ...]) -> None:
    result = json.loads(run("explain", *words, "--arch", "sm_80", "--json").stdout)
    assert result["case"] == FULL
    assert result["chosen"] != "none" and any(c["supported"] for c in result["candidates"])
    text = run("explain", *words, "--device", "emu:sm_80").stdout
    assert FULL in text and "chosen: " in text and "estimate" in text


def test_explain_keeps_what_the_shell_unquoted() -> None:
    words = ("gemm", "a=f32[4,8]", "b=f32[8,4]", "bias=f32[4]", "epilogue=relu(acc + bias)")
    assert "epilogue='relu(acc + bias" in run("explain", *words, "--arch", "sm_80").stdout


def test_explain_shows_the_unsupported(fake_device: FakeBackend, double_op) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.no", "right", reason="not on a Tuesday"))
    text = run("explain", DOUBLE).stdout
    assert "not on a Tuesday" in text and "chosen: none" in text


def test_explain_of_an_unknown_architecture() -> None:
    assert "sm_91" in fails("explain", CASE, "--arch", "sm_91")


def test_dump_ptx_spec_and_files(tmp_path: Path) -> None:
    ptx = run("dump", CASE, "--engine", "gemm.direct", "--arch", "sm_80").stdout
    assert ".target sm_80" in ptx and ".visible .entry" in ptx
    spec = run("dump", CASE, "--engine", "gemm.direct", "--spec", "--arch", "sm_80").stdout
    assert '"template": "matmul/direct"' in spec and "TensorArg(name='a'" in spec and ".entry" not in spec
    words = ("dump", CASE, "--ptx", "--spec", "--engine", "gemm.direct", "--arch", "sm_80", "--out", str(tmp_path / "new"))
    listed = run(*words).stdout.split()
    assert sorted(Path(p).suffix for p in listed) == [".ptx", ".spec"]
    assert Path(next(p for p in listed if p.endswith(".ptx"))).read_text().strip() == ptx.strip()


def test_dump_sass() -> None:
    pytest.importorskip("cuda.bindings.nvjitlink")
    sass = run("dump", CASE, "--engine", "gemm.direct", "--sass", "--arch", "sm_90a").stdout
    assert "FFMA" in sass and "EXIT" in sass and "0 bytes spilled" in sass


def test_dump_of_another_engine_or_config() -> None:
    assert "engine is 'gemm.none' (expected" in fails("dump", CASE, "--engine", "gemm.none", "--arch", "sm_80")
    message = fails("dump", CASE, "--engine", "gemm.direct", "--config", "tile9", "--arch", "sm_80")
    assert "config of gemm.direct is 'tile9' (expected " in message


# ---- measuring ----------------------------------------------------------------------------------------------------------------------


def test_tune_records_and_skips_what_is_held(fake_device: FakeBackend) -> None:
    result = run("tune", DOUBLE)
    assert "double.right variant0" in result.stdout and "4.00" in result.stdout and "winner" in result.stdout
    assert "NumericsError" in result.stdout and "1.0 of 1: done" in result.stderr
    row = TuningDb.open().entries(op="double")[0]
    assert (row.engine, row.us, row.gpu) == ("double.right", 4.0, "Fake GPU")
    launched = fake_device.num_launches
    assert "held already" in run("tune", DOUBLE).stdout and fake_device.num_launches == launched
    run("tune", DOUBLE, "--force")
    assert fake_device.num_launches > launched


def test_tune_json_tells_regret(fake_device: FakeBackend, double_op) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.boaster", "right", 6.0, estimates=(1.0,)), FakeEngine("double.modest", "right", 4.0, estimates=(2.0,)))
    found = json.loads(run("tune", DOUBLE, "--json").stdout)
    assert found["untuned_regret_geomean"] == pytest.approx(1.5) and found["device"] == "Fake GPU"
    (problem,) = found["problems"]
    assert [m["engine"] for m in problem["measurements"]] == ["double.modest", "double.boaster"]


def test_tune_of_files_goes_on_past_what_no_engine_takes(fake_device: FakeBackend, double_op, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    class Small(FakeEngine):
        def check_support(self, problem, device):  # type: ignore[no-untyped-def]
            self.reason = "too large" if problem.desc("x").numel > 10 else ""
            return super().check_support(problem, device)

    double_op(Small("double.small", "right"))
    path = tmp_path / "cases.txt"
    path.write_text("# a comment\ndouble x=f32[64]\ndouble x=f32[5]\ndouble x=f32[0]\ndouble x=f32[5]\n")
    result = run("tune", str(path), code=1)
    assert "no engine takes it" in result.stdout and "empty: nothing to launch" in result.stdout
    assert [r.problem for r in TuningDb.open().entries()] == ["double x=f32[5]nchw y=f32[5]nchw"]


def test_tune_fails_when_no_candidate_passes(fake_device: FakeBackend, double_op) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.wrong", "wrong"), FakeEngine("double.lazy", "lazy"))
    assert "NumericsError" in run("tune", DOUBLE, code=1).stdout


def test_tune_stops_at_a_dead_device(fake_device: FakeBackend, double_op) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.die", "die"))
    result = CliRunner().invoke(main, ["tune", DOUBLE])
    assert result.exit_code == 2 and "double.die variant0 left the device unusable" in result.stderr


def test_tune_of_a_network_and_shapes(fake_device: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def tune_one(problem, backend, db, progress, **options):  # type: ignore[no-untyped-def]
        seen.append(arguments.parse_case.__module__ and measuring.format_case(problem))
        return {"case": seen[-1], "status": "winner", "untuned_regret": None, "measurements": []}

    monkeypatch.setattr(measuring, "_tune_one", tune_one)
    run("tune", "--network", "vgg16", "--batch", "2", "--dtype", "f16", "--layout", "nchw", "--direction", "fprop,dgrad", "--deterministic")
    assert len(seen) == 10 and sum(s.startswith("conv_dgrad") for s in seen) == 5
    assert all("f16[2," in s and "nhwc" not in s and "deterministic=True" in s for s in seen)
    seen.clear()
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"square": [64, 64, 128]}))
    run("tune", "--shapes", str(shapes), "--math", "tf32", "--dtype", "f32", CASE)
    assert len(seen) == 3 and seen[0] == FULL and seen[1].endswith("math=tf32")


def test_bench_takes_an_onnx_model(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    shapes = {"a": ("N", 6), "b": (6, 5), "c": ("N", 5)}
    tensors = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["a", "b"], ["c"])], "net", tensors[:2], tensors[2:])
    (tmp_path / "net.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    words = ("bench", "--onnx", str(tmp_path / "net.onnx"), "--batch", "6", "--device", "emu:sm_80", "--engine", "gemm.direct", "--json")
    (result,) = json.loads(run(*words).stdout)["results"]
    assert result["case"] == "gemm a=f32[6,6]nchw b=f32[6,5]nchw d=f32[6,5]nchw" and result["of_bound"] is None and result["us"] > 0


@pytest.mark.parametrize("command", ["tune", "bench"])
@pytest.mark.parametrize("words, said", [
    (("--onnx", "absent.onnx"), "absent.onnx"),
    ((), "no case given"), (("no_such_file.txt",), "neither a case nor a case file"), (("--network", "alexnet"), "resnet50"),
    (("--network", "resnet50", "--direction", "forward"), "direction is 'forward'"), (("--network", "resnet50", "--dtype", "f33"), "f33"),
    (("--shapes", "absent.json"), "absent.json"), ((CASE, "--math", "best"), "--math is 'best'"),
])
def test_wrong_problems(command: str, words: tuple[str, ...], said: str) -> None:
    assert said in fails(command, *words)


def test_bench(fake_device: FakeBackend) -> None:
    (result,) = json.loads(run("bench", DOUBLE, "--engine", "double.right", "--json").stdout)["results"]
    assert result["us"] == 4.0 and result["iqr_us"] == 0.0 and result["checked"] is True and result["config"] == "variant0"
    assert result["tbps"] == pytest.approx(2 * 64 * 4 / 4.0 / 1e6)
    text = run("bench", DOUBLE, "--engine", "double.right", "--config", "variant1").stdout
    assert "double.right variant1" in text and "8.00" in text


def test_bench_refuses_wrong_results_unless_told_not_to_look(fake_device: FakeBackend) -> None:
    result = CliRunner().invoke(main, ["bench", DOUBLE])  # the smallest estimate is the wrong one's
    assert result.exit_code == 2 and "expected" in result.stderr and "double.wrong" in result.stderr
    assert "1.00" in run("bench", DOUBLE, "--no-check").stdout
    run("tune", DOUBLE)
    assert "double.right" in run("bench", DOUBLE).stdout  # the database knows better now
    result = CliRunner().invoke(main, ["bench", "double x=f32[0]"])
    assert result.exit_code == 2 and "is empty" in result.stderr


def test_bound_is_the_slower_of_arithmetic_and_memory() -> None:
    h100 = known_device("sm_90a")
    product = arguments.problem_of(["gemm a=bf16[8192,8192] b=bf16[8192,8192]"])
    assert measuring.bound_us(product, h100) == pytest.approx(2 * 8192**3 / 790e12 * 1e6)
    vector = arguments.problem_of(["gemm a=bf16[1,8192] b=bf16[8192,8192]"])
    assert measuring.bound_us(vector, h100) == pytest.approx(2 * (8192 * 8192 + 2 * 8192) / 3030e9 * 1e6)
    single = arguments.problem_of(["gemm a=f32[8192,8192] b=f32[8192,8192]"])
    assert measuring.bound_us(single, h100) == pytest.approx(2 * 8192**3 / 60e12 * 1e6)


# ---- running ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [
    CASE, f"oxidnn,plan,gemm.direct,default,cubin:disk,{FULL}", f"oxidnn,exec,gemm.direct,default,cubin:memory,{FULL},41.2us,63%",
    f"oxidnn,dispatch,gemm.direct,default,estimate,{FULL}", f"oxidnn,tune,gemm.direct,default,3.20us,{FULL}",
])
def test_repro_runs_the_line(line: str) -> None:
    result = json.loads(run("repro", line, "--device", "emu:sm_80", "--engine", "gemm.direct", "--json").stdout)
    assert result["case"] == FULL and result["engine"] == "gemm.direct" and 0 <= result["worst_error_over_tolerance"] <= 1


def test_repro_takes_engine_and_config_from_the_line(fake_device: FakeBackend) -> None:
    result = json.loads(run("repro", f"oxidnn,plan,double.right,variant1,cubin:disk,{DOUBLE}", "--json").stdout)
    assert (result["engine"], result["config"], result["worst_error_over_tolerance"]) == ("double.right", "variant1", 0.0)
    message = CliRunner().invoke(main, ["repro", f"oxidnn,plan,double.wrong,variant0,cubin:disk,{DOUBLE}"])
    assert message.exit_code == 2 and "double.wrong" in message.stderr and "expected" in message.stderr


@pytest.mark.parametrize("line, said", [
    ("oxidnn,cache,kernel,sm_90a,disk,0123", "holds no case"), ("", "no op"),
    ("oxidnn,plan,gemm.none,default,cubin:disk," + FULL, "gemm.none"),
])
def test_repro_of_lines_without_a_case(line: str, said: str) -> None:
    assert said in fails("repro", line, "--device", "emu:sm_80")


def test_verbose_lines_hold_cases_of_every_op() -> None:
    for op in OPS:
        case, engine, config = arguments.line_of([f"oxidnn,plan,some.engine,tile_m2,cubin:disk,{op} x=f32[2,3]nchw a='(1, 2)',3.5us"])
        assert (case, engine, config) == (f"{op} x=f32[2,3]nchw a='(1, 2)'", "some.engine", "tile_m2")


def test_emu_with_checkers_and_profile() -> None:
    result = json.loads(run("emu", CASE, "--engine", "gemm.direct", "--arch", "sm_80", "--checkers", "all", "--json").stdout)
    assert result["arch"] == "sm_80" and result["worst_error_over_tolerance"] <= 1
    assert len(result["launches"]) == 1 and result["launches"][0]
    text = run("emu", CASE, "--engine", "gemm.direct", "--profile").stdout
    assert "agrees" in text and "launch 0:" in text and "no checker of all fired" in text
    counters = dict(re.findall(r"^(\w+) +(\d+)$", text, re.MULTILINE))
    assert int(counters["instructions"]) > 0 and int(counters["global_read"]) > 0
    assert {"shared_read", "shared_written", "global_written", "bank_conflicts", "uncoalesced_sectors"} <= counters.keys()
    assert re.search(r"^PTX line +executions +bank conflicts +uncoalesced sectors +instruction$", text, re.MULTILINE)


@pytest.mark.parametrize("schedule", ["random", "random:7"])
def test_emu_with_other_schedules_and_checkers(schedule: str) -> None:
    run("emu", CASE, "--engine", "gemm.direct", "--schedule", schedule, "--checkers", "bounds,uninit")


@pytest.mark.parametrize("words, said", [
    (("--checkers", "races"), "--checkers is 'races' (expected none, basic, all, or names out of bounds"),
    (("--checkers", ","), "expected none"),
    (("--schedule", "fifo"), "--schedule is 'fifo'"), (("--schedule", "random:x"), "random:SEED"), (("--arch", "sm_1"), "sm_1"),
])
def test_emu_with_wrong_options(words: tuple[str, ...], said: str) -> None:
    assert said in fails("emu", CASE, *words)


def test_emu_refuses_a_gpu() -> None:
    assert "expected emu" in fails("emu", CASE, "--device", "cuda:0")


# ---- caches -------------------------------------------------------------------------------------------------------------------------


def test_cache_of_tuning_rows(fake_device: FakeBackend, tmp_path: Path) -> None:
    run("tune", DOUBLE)
    rows = json.loads(run("cache", "ls", "--tuning", "--json").stdout)
    assert {(r["engine"], r["us"]) for r in rows} == {("double.right", 4.0), ("double.right", 8.0), ("double.wrong", None)}
    assert "double.right variant0" in run("cache", "ls", "--tuning").stdout
    assert "3 rows written" in run("cache", "export", str(tmp_path / "out.json")).stdout
    assert "3 tuning rows removed" in run("cache", "clear", "--tuning", "--yes").stdout
    assert json.loads(run("cache", "ls", "--tuning", "--json").stdout) == []
    assert "3 rows taken" in run("cache", "import", str(tmp_path / "out.json")).stdout
    assert "0 rows taken" in run("cache", "import", str(tmp_path / "out.json"), "--prefer", "ours").stdout
    assert "absent" in fails("cache", "import", str(tmp_path / "absent.sqlite"))


def test_cache_of_cubins(tmp_path: Path) -> None:
    from oxidnn.runtime.cubin_store import CubinStore

    store = CubinStore()
    for n in range(3):
        assert store.put(f"{n:064x}", {"name": f"kernel{n}", "arch": "sm_80", "assembler": "test"}, bytes(1000))
    assert {e["name"] for e in json.loads(run("cache", "ls", "--json").stdout)} == {"kernel0", "kernel1", "kernel2"}
    assert "kernel1" in run("cache", "ls").stdout
    assert run("cache", "prune", "--max-bytes", "1K").stdout.startswith("3")  # none of three entries above a thousand bytes fits twice
    assert run("cache", "clear", "--yes").exit_code == 0 and store.entries() == []
    assert "lots" in fails("cache", "prune", "--max-bytes", "lots")
    refused = CliRunner().invoke(main, ["cache", "clear"], input="n\n")
    assert refused.exit_code == 1


def test_tables_are_plain_columns_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    arguments.print_table(("a", "bb"), [("ccc", 1), ("d", 22)], "title")
    assert capsys.readouterr().out == "title\na    bb\nccc  1\nd    22\n"


def test_tune_wants_a_device_that_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "open_backend", lambda device: EmulatedBackend("sm_90a"))
    assert "tune: there is no GPU" in fails("tune", CASE)


def test_a_reader_may_leave() -> None:
    command = [sys.executable, "-m", "oxidnn", "emu", "conv_fprop x=f32[1,1,4,4] w=f32[1,1,3,3]", "--profile"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
