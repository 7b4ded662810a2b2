"""to_tensorboard: what it writes, and what a real TensorBoard reads of it."""

from __future__ import annotations

import sys
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark_lab.errors import LabError
from dspark_lab.export import server
from dspark_lab.export.scalars import series, summary
from dspark_lab.export.tensorboard import list_runs, serve, to_tensorboard
from dspark_lab.runs.record import Run

PLUGIN = "data/plugin/pytorch_profiler"
ONE = "tiny-ep1-blocking-bs4"
TWO = "tiny-ep1-tp2-none-bs4"


def two_runs(make_run: Callable[..., Run], h200: Path) -> list[Run]:
    ranks = tuple(h200 / f"tp2_bs1_hw0_none_rank{r}.json.gz" for r in (0, 1))
    return [
        make_run(alloc="blocking", traces=(h200 / "trace_blocking.json.gz",)),
        make_run(alloc="none", tp_size=2, num_ranks=2, traces=ranks),
    ]


class TestWriting:
    def test_captures_are_copied_byte_for_byte(self, make_run, h200: Path, tmp_path: Path):
        logdir = to_tensorboard(two_runs(make_run, h200), logdir=tmp_path / "tb")
        assert sorted(p.name for p in logdir.iterdir()) == [ONE, TWO]
        (copy,) = (logdir / ONE).glob("rank0_*.pt.trace.json.gz")
        assert copy.read_bytes() == (h200 / "trace_blocking.json.gz").read_bytes()
        assert len(list((logdir / TWO).glob("rank?_*.pt.trace.json.gz"))) == 2
        assert len(list(logdir.glob("*/*tfevents*"))) == 2
        assert sorted(p.name for p in tmp_path.iterdir()) == ["tb"], "nothing is left beside the logdir"

    def test_one_run_need_not_be_in_a_list(self, make_run, tmp_path: Path):
        logdir = to_tensorboard(make_run(), logdir=tmp_path / "tb")
        assert [p.name for p in logdir.iterdir()] == ["tiny-ep1-on_demand-bs4"]

    def test_the_same_run_again_replaces_its_folder_and_another_gets_its_own(self, make_run, tmp_path: Path):
        run, other = make_run(), make_run(step_us=2000.0)
        for r in (run, run, other, other):
            to_tensorboard(r, logdir=tmp_path / "tb")
        names = sorted(p.name for p in (tmp_path / "tb").iterdir())
        assert names == ["tiny-ep1-on_demand-bs4", "tiny-ep1-on_demand-bs4-2"]
        assert all(len(list((tmp_path / "tb" / n).glob("*tfevents*"))) == 1 for n in names)

    def test_a_folder_of_someone_else_is_left_alone(self, make_run, tmp_path: Path):
        mine = tmp_path / "tb" / "tiny-ep1-on_demand-bs4"
        mine.mkdir(parents=True)
        (mine / "notes.txt").write_text("keep")
        to_tensorboard(make_run(), logdir=tmp_path / "tb")
        assert (mine / "notes.txt").read_text() == "keep"
        assert (tmp_path / "tb" / "tiny-ep1-on_demand-bs4-2").is_dir()

    def test_torch_is_not_needed(self, tmp_path: Path):
        import subprocess

        code = (
            "import sys; sys.modules['torch'] = None; sys.modules['plotly'] = None\n"
            "import dspark_lab as lab; from dspark_lab.runs.record import Run, empty_steps\n"
            "run = Run(name='r', config=lab.preset('tiny'), source='measured', steps=empty_steps(), environment={})\n"
            f"print(lab.to_tensorboard([run], logdir={str(tmp_path / 'tb')!r}))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert list((tmp_path / "tb").glob("*/*tfevents*"))


class TestRefusals:
    def test_no_runs(self, tmp_path: Path):
        with pytest.raises(LabError, match="no runs"):
            to_tensorboard([], logdir=tmp_path / "tb")
        assert not (tmp_path / "tb").exists()

    def test_something_that_is_no_run(self, tmp_path: Path):
        with pytest.raises(LabError, match="'x' is no Run"):
            to_tensorboard(["x"], logdir=tmp_path / "tb")  # pyright: ignore[reportArgumentType]

    def test_a_capture_that_is_gone(self, make_run, tmp_path: Path):
        with pytest.raises(LabError, match="gone"):
            to_tensorboard([make_run(), make_run(traces=(tmp_path / "gone.json",))], logdir=tmp_path / "tb")
        assert not (tmp_path / "tb").exists()

    def test_a_logdir_that_is_a_file(self, make_run, tmp_path: Path):
        (tmp_path / "file").write_text("x")
        for logdir in (tmp_path / "file", tmp_path / "file" / "tb"):
            with pytest.raises(LabError, match=r"cannot write to logdir='.*file.*choose a folder"):
                to_tensorboard(make_run(), logdir=logdir)
        assert [p.name for p in tmp_path.iterdir()] == ["file"]

    def test_a_logdir_without_permission(self, make_run, tmp_path: Path, monkeypatch):
        def refuse(*_: object) -> None:  # root may write everywhere, so the refusal is played
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("dspark_lab.export.tensorboard.shutil.move", refuse)
        with pytest.raises(LabError, match=r"cannot write to logdir=.*Permission denied"):
            to_tensorboard(make_run(), logdir=tmp_path / "tb")
        assert not list((tmp_path / "tb").iterdir())

    def test_a_failure_midway_leaves_nothing(self, make_run, tmp_path: Path, monkeypatch):
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("dspark_lab.export.tensorboard.write_scalars", full)
        with pytest.raises(LabError, match="No space left"):
            to_tensorboard([make_run(), make_run(ep_size=2)], logdir=tmp_path / "tb")
        assert not list((tmp_path / "tb").iterdir())
        assert [p.name for p in tmp_path.iterdir()] == ["tb"]

    def test_without_tensorboard_captures_are_written_with_a_warning(
        self, make_run, h200: Path, tmp_path: Path, monkeypatch
    ):
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        with pytest.warns(UserWarning, match="no scalars.*pip install"):
            logdir = to_tensorboard(two_runs(make_run, h200), logdir=tmp_path / "tb")
        assert len(list(logdir.glob("*/*.pt.trace.json.gz"))) == 3
        assert not list(logdir.glob("*/*tfevents*"))

    def test_without_tensorboard_and_captures_there_is_nothing_to_write(self, make_run, tmp_path: Path, monkeypatch):
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        with pytest.raises(LabError, match="pip install"):
            to_tensorboard(make_run(), logdir=tmp_path / "tb")
        assert not (tmp_path / "tb").exists()


class TestSeries:
    def test_unprofiled_steps_repeats_one_after_the_other_maximum_over_ranks(self, make_run):
        charts = {s.tag: s for s in series(make_run(num_ranks=2))}
        # steps 2 to 5 of two repeats; rank 1 is the slower one
        want = [1.021, 1.031, 1.041, 1.051, 1.121, 1.131, 1.141, 1.151]
        assert charts["step_latency_ms"].points == list(enumerate(pytest.approx(x) for x in want))
        assert charts["step_latency_ms_p50"].points == [(0, pytest.approx(1.086))]
        assert charts["accept_length"].points == [(0, pytest.approx(1 + (6 + 4 + 4 + 4 + 4) / 8))]
        assert [k for k, _ in charts["accept_rate"].points] == [1, 2, 3, 4, 5]
        assert "step_latency_ms_profiled" not in charts
        assert all("unprofiled" in charts[t].about for t in ("step_latency_ms", "step_latency_ms_p50"))

    def test_profiled_steps_have_a_chart_of_their_own(self, make_run):
        charts = {s.tag: s for s in series(make_run(profiled=True, acceptance=None))}
        assert set(charts) == {"step_latency_ms_profiled"}
        assert "not to be compared" in charts["step_latency_ms_profiled"].about

    def test_the_text_says_where_it_comes_from(self, make_run):
        text = summary(make_run(alloc="blocking"))
        assert "| figures | measured 2026-11-30 on CPU (test), unprofiled |" in text
        assert "| alloc | blocking |" in text


@pytest.fixture(scope="module")
def url(make_run, h200: Path, tmp_path_factory) -> Iterator[str]:
    logdir = to_tensorboard(two_runs(make_run, h200), logdir=tmp_path_factory.mktemp("real") / "tb")
    with serve(logdir) as tb:
        assert list_runs(tb.url) == [ONE, TWO]
        yield tb.url


@pytest.fixture(scope="module")
def plugin(url: str) -> Callable[..., Any]:
    return lambda route, **params: server.ask(url, f"{PLUGIN}/{route}", **params)


class TestRealTensorBoard:
    """One server for all: what it lists and serves over HTTP, without a browser."""

    def worker(self, plugin: Callable[..., Any]) -> dict[str, Any]:
        (name,) = plugin("workers", run=ONE, view="Overview")
        return {"run": ONE, "worker": name, "span": 1}

    def test_views_workers_and_spans(self, plugin):
        assert {"Overview", "Operator", "Kernel", "Trace"} <= set(plugin("views", run=ONE))
        assert [w.split("_")[0] for w in plugin("workers", run=TWO, view="Overview")] == ["rank0", "rank1"]
        assert plugin("spans", run=ONE, worker=self.worker(plugin)["worker"]) == ["1"]

    def test_overview_has_the_eight_steps_on_a_gpu(self, plugin):
        overview = plugin("overview", **self.worker(plugin))
        # the plugin counts host and GPU annotations of a step apart
        assert {row[0] for row in overview["steps"]["rows"]} == {str(n) for n in range(8)}
        assert {"title": "Device Type", "value": "GPU"} in overview["environments"]

    def test_kernels(self, plugin):
        names = [row[0] for row in plugin("kernel", **self.worker(plugin))["total"]["rows"]]
        assert any("cutlass" in n for n in names)

    def test_operators(self, plugin):
        names = [row[0] for row in plugin("operation", **self.worker(plugin))["host_total_time"]["rows"]]
        assert "aten::to" in names

    def test_the_trace_itself(self, plugin):
        names = {e.get("name") for e in plugin("trace", **self.worker(plugin))["traceEvents"]}
        assert {"ProfilerStep#0", "cudaGraphLaunch", "cudaStreamSynchronize"} <= names

    def test_scalars_and_text(self, url: str):
        tags = server.ask(url, "data/plugin/scalars/tags")
        assert {"step_latency_ms", "step_latency_ms_p50", "accept_length", "accept_rate"} <= set(tags[ONE])
        assert "unprofiled" in tags[ONE]["step_latency_ms"]["description"]
        points = server.ask(url, "data/plugin/scalars/scalars", run=ONE, tag="step_latency_ms")
        assert [(step, round(value, 3)) for _, step, value in points] == list(
            enumerate([1.02, 1.03, 1.04, 1.05, 1.12, 1.13, 1.14, 1.15])
        )
        assert server.ask(url, "data/plugin/text/tags")[ONE] == ["run"]
        (text,) = server.ask(url, "data/plugin/text/text", run=ONE, tag="run")
        assert "CPU (test)" in text["text"]

    def test_stop_ends_it(self, make_run, tmp_path: Path):
        tb = serve(to_tensorboard(make_run(), logdir=tmp_path / "tb"))
        assert list_runs(tb.url) == []
        assert tb.url in tb._repr_html_()
        tb.stop()
        tb.stop()
        assert "stopped" in repr(tb)
        with pytest.raises(LabError, match="no TensorBoard answers"):
            list_runs(tb.url)

    def test_a_port_that_is_taken(self, url: str, make_run, tmp_path: Path):
        port = urllib.parse.urlsplit(url).port
        assert port is not None
        with pytest.raises(LabError, match=f"port {port} ended with"):
            serve(to_tensorboard(make_run(), logdir=tmp_path / "tb"), port=port)


def test_serve_refuses_a_logdir_without_runs(tmp_path: Path):
    for logdir in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(LabError, match=r"holds no run.*to_tensorboard"):
            serve(logdir)


def test_list_runs_where_nothing_listens():
    with pytest.raises(LabError, match="no TensorBoard answers at http://localhost:9/"):
        list_runs("http://localhost:9/")
